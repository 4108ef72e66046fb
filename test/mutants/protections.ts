/** The protections by name, with what each is for: as `seam/protections.ts` says it, which is the only list. */
import { readFileSync } from "node:fs";

export const file = new URL("../../packages/holdfast/src/seam/protections.ts", import.meta.url);

export interface Protection {
  readonly name: string;
  /** What happens without it. */
  readonly against: string;
}

const declaration = /\/\*\* (?<against>[^*]+) \*\/\nexport const (?<name>\w+): boolean = true;\n/g;

export function protections(text = readFileSync(file, "utf8")): readonly Protection[] {
  return [...text.matchAll(declaration)].map(({ groups }) => ({
    name: groups?.["name"] as string,
    against: groups?.["against"] as string,
  }));
}

/** The list with one of them off. */
export function without(name: string, text: string): string {
  const on = `export const ${name}: boolean = true;`;
  if (!text.includes(on)) throw new Error(`${file.pathname} has no protection "${name}"`);
  return text.replace(on, on.replace("true", "false"));
}
