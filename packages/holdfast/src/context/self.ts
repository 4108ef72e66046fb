import { fileURLToPath } from "node:url";

/**
 * The file that this is in. In a bundle for CommonJS `import.meta` is empty, but the bundle has a name. Where there are no
 * files, as in workerd, it is undefined.
 */
function file(): string | undefined {
  if (typeof __filename === "string") return __filename;
  const url: string | undefined = import.meta.url;
  return url?.startsWith("file:") ? fileURLToPath(url) : undefined;
}

export const self = file();
