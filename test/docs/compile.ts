/**
 * Blocks of code, compiled. Each is a module. What it does not declare or import is taken from the blocks before it on the page,
 * from what a reader has (reader.ts), or from Holdfast; what is in none of these is the reader's own, and may be anything.
 */
import { execFile } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { root } from "../harness/command.ts";
import type { Block } from "./markdown.ts";

/** Apart from the sources, which other tests look through, and with their packages. */
let folder = "";

interface Module extends Block {
  /** Below the folder. */
  readonly path: string;
  /** Names declared at its top level. */
  readonly declares: ReadonlySet<string>;
  readonly body: string;
  head: string[];
}

interface Problem {
  readonly path: string;
  readonly line: number;
  readonly code: number;
  readonly message: string;
}

/** `…` stands for what is left out. */
const filled = (code: string) =>
  code
    .replaceAll(/\{ … \}/g, "{ return undefined as any; }")
    .replaceAll(/\(…\)/g, "(undefined as any)")
    .replaceAll(/, …(?=[)\]])/g, "")
    .replaceAll(/^(\s*)…;?$/gm, "$1// …");

function declared(code: string): Set<string> {
  const names = new Set<string>();
  for (const [, name = ""] of code.matchAll(
    /^(?:export )?(?:declare )?(?:async )?(?:abstract )?(?:const|let|var|function\*?|class|interface|type|enum) (\w+)/gm,
  ))
    names.add(name);
  for (const [, list = ""] of code.matchAll(/^(?:export )?(?:const|let|await using) [{[]([^=]*?)[}\]] =/gm))
    for (const part of list.split(",")) names.add(part.split(":").at(-1)?.replace(/=.*/, "").trim() ?? "");
  for (const [, name = ""] of code.matchAll(/^await using (\w+) =/gm)) names.add(name);
  return new Set([...names].filter((name) => /^\w+$/.test(name)));
}

/** What a block imports is there for the ones that come after it too. */
function imports(code: string): Map<string, string> {
  const found = new Map<string, string>();
  for (const [, clause = "", from = ""] of code.matchAll(/^import (?!type )([^;]*?) from "([^"]+)";$/gm)) {
    const [, whole] = /^(\w+)/.exec(clause) ?? [];
    if (whole !== undefined) found.set(whole, `import ${whole} from "${from}";`);
    for (const part of (/\{([^}]*)\}/.exec(clause)?.[1] ?? "").split(",")) {
      const name = part.trim().replace(/^type /, "");
      if (name !== "") found.set(name.split(" as ").at(-1) ?? "", `import { ${name} } from "${from}";`);
    }
  }
  return found;
}

/** What `holdfast` itself exports, but for types: a reader may have one of the same name. */
function exported(): Set<string> {
  const text = readFileSync(join(root, "packages/holdfast/src/index.ts"), "utf8");
  const lists = [...text.matchAll(/^export \{([^}]*)\}/gm)].flatMap(([, list = ""]) => list.split(","));
  const names = lists.map((part) => part.trim()).filter((part) => !part.startsWith("type "));
  return new Set(names.map((name) => name.split(" as ").at(-1) ?? "").filter(Boolean));
}

const reader = join(root, "test/docs/reader.ts");
const readerNames = declared(readFileSync(reader, "utf8").replaceAll("$", "_DOLLAR_"));

function write(path: string, text: string): void {
  const file = join(folder, path);
  mkdirSync(dirname(file), { recursive: true });
  writeFileSync(file, text);
}

const textOf = ({ head, body, declares }: Module) => {
  const hidden = [...declares].filter((name) => !new RegExp(`^export [^\\n]*\\b${name}\\b`, "m").test(body));
  return [...head, body, hidden.length > 0 ? `export { ${hidden.join(", ")} };` : "export {};", ""].join(
    "\n",
  );
};

async function compile(modules: readonly Module[]): Promise<Problem[]> {
  for (const module of modules) write(module.path, textOf(module));
  const output = await new Promise<string>((resolve, reject) => {
    execFile(
      process.execPath,
      [join(root, "node_modules/typescript/bin/tsc"), "-p", folder, "--pretty", "false"],
      { cwd: folder, maxBuffer: 1 << 26 },
      (error, stdout, stderr) =>
        error && stdout === "" ? reject(new Error(stderr || error.message)) : resolve(stdout),
    );
  });
  return [...output.matchAll(/^([^\s(][^(\n]*)\((\d+),\d+\): error TS(\d+): (.*)$/gm)].map(
    ([, path = "", line, code, message = ""]) => ({ path, line: Number(line), code: Number(code), message }),
  );
}

/** Names that are one letter away from one of Holdfast's are a slip, and not the reader's own. */
function near(a: string, b: string): boolean {
  if (a.toLowerCase() === b.toLowerCase() || a.length < 5 || Math.abs(a.length - b.length) > 1) return false;
  let start = 0;
  while (start < a.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end++;
  return Math.max(a.length, b.length) - start - end <= 1;
}

/** What comes of a name that may be anything: of an entity that is not known, nothing can be written. */
const unknown = /type 'never'|is of type 'unknown'|^Untyped function calls/;

/** What the compiler has against them, as `file:line: message`. */
export async function problemsOf(blocks: readonly Block[]): Promise<string[]> {
  const place = mkdtempSync(join(tmpdir(), "holdfast-docs-"));
  // Deep enough for what a block imports from above it.
  folder = join(place, "a/b/c/test");
  try {
    write("package.json", '{ "type": "module" }');
    symlinkSync(join(root, "node_modules"), join(place, "node_modules"));
    symlinkSync(join(root, "test/node_modules"), join(folder, "node_modules"));
    return await problemsIn(blocks);
  } finally {
    rmSync(place, { recursive: true });
  }
}

async function problemsIn(blocks: readonly Block[]): Promise<string[]> {
  const modules = blocks.map((block, i): Module => {
    const body = filled(block.code);
    const page = block.file.replaceAll(/[/.]/g, "-");
    return { ...block, body, path: `${page}/${i}.ts`, declares: declared(body), head: [] };
  });
  write(
    "tsconfig.json",
    JSON.stringify({
      extends: join(root, "tsconfig.base.json"),
      compilerOptions: {
        noEmit: true,
        customConditions: ["holdfast-source"],
        noImplicitAny: false,
        noUnusedLocals: false,
        noUnusedParameters: false,
        // Stricter than most projects are, and modules here are put together of several blocks.
        noUncheckedIndexedAccess: false,
        exactOptionalPropertyTypes: false,
        verbatimModuleSyntax: false,
        isolatedModules: false,
        erasableSyntaxOnly: false,
        rewriteRelativeImportExtensions: false,
        experimentalDecorators: true,
      },
      include: ["**/*.ts"],
    }),
  );
  // As authentication adds it.
  write("express.d.ts", "declare namespace Express { interface Request { user?: any } }\n");
  const own = exported();
  const byPath = new Map(modules.map((module) => [module.path, module]));
  const found: string[] = [];
  const stubs = new Map<string, Set<string>>();
  const foreign = new Set<string>();
  for (const { path, code, message } of await compile(modules)) {
    const module = byPath.get(path);
    if (module === undefined) continue;
    const [, name = ""] = /'([^']+)'/.exec(message) ?? [];
    if ([2304, 2503, 2552, 2582, 2583, 2584, 2593, 18004].includes(code)) {
      const line = origin(module, modules, name, own);
      if (line === undefined) {
        const slip = [...own].find((known) => near(name, known));
        if (slip !== undefined) found.push(`${module.file}:${module.line}: ${name}: did you mean ${slip}?`);
      }
      const any = `const ${name}: any = undefined; type ${name} = any;`;
      if (!module.head.includes(line ?? any)) module.head.push(line ?? any);
    } else if (code === 2307 && name.startsWith(".")) {
      const target = join(dirname(path), name);
      const names = stubs.get(target) ?? new Set();
      stubs.set(target, names);
      for (const [each, text] of imports(module.body))
        if (text.includes(`"${name}"`)) names.add(text.startsWith("import {") ? each : "default");
    } else if (code === 2307 && !name.startsWith("holdfast")) foreign.add(name);
  }
  for (const [path, names] of stubs)
    write(
      path,
      path === "docs-quick-start-md/generated/prisma/client.ts"
        ? `export * from "${join(root, "test/generated/prisma/client.ts")}";\n`
        : [...names]
            .map((name) =>
              name === "default"
                ? "const all: any = undefined; export default all;"
                : `export const ${name}: any = undefined; export type ${name} = any;`,
            )
            .join("\n"),
    );
  if (foreign.size > 0)
    write("foreign.d.ts", [...foreign].map((name) => `declare module "${name}";`).join("\n"));
  for (const { path, line, message } of await compile(modules)) {
    const module = byPath.get(path);
    if (module !== undefined && !unknown.test(message))
      found.push(`${module.file}:${module.line + line - 1 - module.head.length}: ${message}`);
  }
  return found;
}

/** The line that brings a name into a module. */
function origin(
  module: Module,
  modules: readonly Module[],
  name: string,
  own: ReadonlySet<string>,
): string | undefined {
  const before = modules.slice(0, modules.indexOf(module)).filter(({ file }) => file === module.file);
  // The first one: others on the page are other ways to do it. Where there are tabs, that of pg.
  const earlier = [...before.filter(({ tab }) => tab === "pg"), ...before.filter(({ tab }) => !tab)];
  if (module.tab !== undefined && readerNames.has(`${name}_DOLLAR_${module.tab}`))
    return `import { ${name}$${module.tab} as ${name} } from "${reader}";`;
  for (const { path, declares, body } of earlier) {
    if (declares.has(name)) return `import { ${name} } from "../${path}";`;
    const imported = imports(body).get(name);
    if (imported !== undefined) return imported;
  }
  if (readerNames.has(name)) return `import { ${name} } from "${reader}";`;
  return own.has(name) ? `import { ${name} } from "holdfast";` : undefined;
}
