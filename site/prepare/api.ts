/** The reference of what applications import, from the types and their comments. */
import { createHash } from "node:crypto";
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { Application, Converter, type ProjectReflection, ReflectionKind, type TypeDocOptions } from "typedoc";
import type { PluginOptions } from "typedoc-plugin-markdown";
import { anchorsOf } from "../.vitepress/slug.ts";
import { filesIn, read, root } from "./places.ts";

export interface ApiPage {
  readonly path: string;
  readonly page: string;
}

interface Manifest {
  exports: Record<string, string | { "holdfast-source"?: string }>;
}

/** The names that source files are imported by. */
function entrances(): Map<string, string> {
  const manifest: Manifest = JSON.parse(read("packages/holdfast/package.json"));
  return new Map(
    Object.entries(manifest.exports).flatMap(([name, target]) => {
      const source = typeof target === "string" ? undefined : target["holdfast-source"];
      return source === undefined
        ? []
        : [[resolve(root, "packages/holdfast", source), join("holdfast", name)]];
    }),
  );
}

/** Making it takes longer than anything else here, so it is kept until a source changes. */
export async function api(): Promise<ApiPage[]> {
  const hash = createHash("sha256");
  for (const path of ["site/prepare/api.ts", ...filesIn("packages/holdfast/src")]) hash.update(read(path));
  const kept = join(root, "site/.vitepress/cache", `api-${hash.digest("hex").slice(0, 16)}.json`);
  if (existsSync(kept)) return JSON.parse(readFileSync(kept, "utf8"));
  const pages = await makeApi();
  mkdirSync(dirname(kept), { recursive: true });
  writeFileSync(kept, JSON.stringify(pages));
  return pages;
}

async function makeApi(): Promise<ApiPage[]> {
  const names = entrances();
  const out = mkdtempSync(join(tmpdir(), "holdfast-api-"));
  const options: TypeDocOptions & PluginOptions = {
    plugin: [fileURLToPath(import.meta.resolve("typedoc-plugin-markdown"))],
    tsconfig: join(root, "site/tsconfig.api.json"),
    entryPoints: [...names.keys()],
    out,
    // They have been checked by the compiler of the repository.
    skipErrorChecking: true,
    logLevel: "Error",
    excludeExternals: true,
    excludePrivate: true,
    excludeInternal: true,
    disableSources: true,
    readme: "none",
    groupOrder: ["Functions", "Variables", "Classes", "*"],
    router: "module",
    entryFileName: "index",
    hidePageHeader: true,
    hideBreadcrumbs: true,
    parametersFormat: "table",
    interfacePropertiesFormat: "table",
    classPropertiesFormat: "table",
    typeDeclarationFormat: "table",
    propertyMembersFormat: "table",
  };
  try {
    const app = await Application.bootstrapWithPlugins(options);
    app.converter.on(Converter.EVENT_RESOLVE_BEGIN, ({ project }) => trimErrors(project));
    const project = await app.convert();
    if (project === undefined) throw new Error("The reference could not be made");
    for (const module of project.children ?? [])
      module.name = names.get(project.files.getReflectionPath(module) ?? "") ?? module.name;
    await app.generateOutputs(project);
    return readdirSync(out, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile() && entry.name.endsWith(".md"))
      .map((entry) => join(entry.parentPath, entry.name))
      .map((file) => ({ path: relative(out, file), page: anchored(readFileSync(file, "utf8")) }));
  } finally {
    rmSync(out, { recursive: true });
  }
}

/** Some links to a heading count one that is not there: `#queuecounts-1`, where there is but one. */
function anchored(markdown: string): string {
  const anchors = anchorsOf(markdown);
  return markdown.replaceAll(/\(#([\w-]+)-\d+\)/g, (link, first: string) =>
    anchors.has(link.slice(2, -1)) ||
    markdown.includes(`<a id="${link.slice(2, -1)}">`) ||
    !anchors.has(first)
      ? link
      : `(#${first})`,
  );
}

/** Nobody but the library makes errors: how they are made, and what all of them have, is left out of each. */
function trimErrors(project: ProjectReflection): void {
  const classes = project
    .getReflectionsByKind(ReflectionKind.Class)
    .filter(({ name }) => name.endsWith("Error"));
  for (const error of classes) {
    if (!error.isDeclaration()) continue;
    const left = error.children?.filter(
      (member) => member.kind === ReflectionKind.Constructor || member.inheritedFrom !== undefined,
    );
    for (const member of left ?? []) project.removeReflection(member);
  }
}
