/**
 * The directions in which imports may go. They are what lets an engine or a client come later without a change to
 * the shared code, so they are held by a test and not by good will. The rules are functions of a tree of texts:
 * each is also shown a tree that breaks it, since a rule that finds nothing looks like a rule that is kept.
 */
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { builtinModules } from "node:module";
import { dirname, join, relative } from "node:path";
import { join as joinUrl, normalize } from "node:path/posix";
import { fileURLToPath } from "node:url";
import { describe, expect, test } from "vitest";
import { parseAst } from "vitest/node";

const root = fileURLToPath(new URL("..", import.meta.url));
const library = "packages/holdfast";
const src = `${library}/src`;

/** Paths from the root of the repository, with the text of each file. */
type Tree = ReadonlyMap<string, string>;

interface Import {
  readonly from: string;
  /** As written; undefined: computed at run time. */
  readonly specifier: string | undefined;
  /** The path from the root, for relative specifiers. */
  readonly to: string | undefined;
  /** Nothing is left of it at run time. */
  readonly typeOnly: boolean;
}

interface Node {
  readonly type: string;
  readonly [property: string]: unknown;
}

const parsed = new Map<string, Node>();

function parse(file: string, text: string): Node {
  const known = parsed.get(text);
  if (known) return known;
  const program = parseAst(text, { lang: "ts" }, file) as unknown as Node;
  parsed.set(text, program);
  return program;
}

function* nodes(value: unknown): Generator<Node> {
  if (Array.isArray(value)) {
    for (const item of value) yield* nodes(item);
  } else if (typeof value === "object" && value !== null) {
    if (typeof (value as Node).type === "string") yield value as Node;
    for (const child of Object.values(value)) yield* nodes(child);
  }
}

function importsOf(file: string, text: string): Import[] {
  const found: Import[] = [];
  const add = (source: unknown, typeOnly: boolean) => {
    const value = (source as { value?: unknown } | null | undefined)?.value;
    const specifier = typeof value === "string" ? value : undefined;
    const to = specifier?.startsWith(".") ? normalize(joinUrl(dirname(file), specifier)) : undefined;
    found.push({ from: file, specifier, to, typeOnly });
  };
  for (const node of nodes(parse(file, text))) {
    switch (node.type) {
      case "ImportDeclaration":
      case "ExportAllDeclaration":
        // `import { type A }` stays as `import {}`: it still loads the module.
        add(node.source, (node.importKind ?? node.exportKind) === "type");
        break;
      case "ExportNamedDeclaration":
        if (node.source) add(node.source, node.exportKind === "type");
        break;
      case "ImportExpression":
        add(node.source, false);
        break;
      case "TSImportType":
        add(node.source, true);
        break;
      case "TSExternalModuleReference":
        add(node.expression, false);
        break;
    }
  }
  return found;
}

function allImports(tree: Tree): Import[] {
  return [...tree].flatMap(([file, text]) => importsOf(file, text));
}

function show({ from, specifier, typeOnly }: Import): string {
  return `${from} imports ${typeOnly ? "the types of " : ""}${specifier ?? "what it computes"}`;
}

// The rules.

/**
 * The rooms of shared code, and what each may use of the others: whatever is below it. An engine sees the seam and what it is
 * made of, a client its engines too.
 */
const agreed = ["seam"];
const basics = [...agreed, "input", "waiting", "context", "events", "time"];
const transactions = [...basics, "transaction"];
const calls = [...transactions, "batch", "shards"];
const rooms: Readonly<Record<string, readonly string[]>> = {
  seam: [],
  input: agreed,
  waiting: agreed,
  context: agreed,
  events: [...agreed, "context"],
  time: [...agreed, "input"],
  transaction: basics,
  shards: transactions,
  batch: transactions,
  audit: calls,
  locks: calls,
  quota: calls,
  stock: calls,
  queue: calls,
  schedule: calls,
};

/** Of src: "seam", "engines/x", "clients/x", …; a file that lies directly in src is its own layer. */
function layerOf(file: string): string {
  const [first = "", second = "", ...rest] = relative(src, file).split("/");
  return ["engines", "clients"].includes(first) && rest.length > 0 ? `${first}/${second}` : first;
}

function mayImport(from: string, to: string, typeOnly: boolean, entrances: ReadonlySet<string>): boolean {
  const [mine, theirs] = [layerOf(from), layerOf(to)];
  if (theirs === mine) return true;
  const room = rooms[mine];
  if (room)
    return (
      room.includes(theirs) ||
      // An engine is made of the contracts of the patterns.
      (mine === "seam" && typeOnly && to.endsWith("/store.ts"))
    );
  if (mine.startsWith("clients"))
    return (
      ["seam", "input", "waiting", "context", "transaction", "clients"].includes(theirs) ||
      theirs.startsWith("engines/") ||
      // Each is one door. How the connections of another work may be of use, as an ORM is built on drivers.
      (theirs.startsWith("clients/") && !entrances.has(to)) ||
      // An extension of a client, such as Prisma's, makes an instance of its own, and says in the client's words what locks are there.
      ["holdfast.ts", "locks"].includes(theirs)
    );
  if (mine.startsWith("engines/"))
    return (
      ["seam", "waiting", "context"].includes(theirs) ||
      // What every engine can have, by a dialect of its own; and what it decides.
      theirs === "engines/sql" ||
      /\/decide(\/[^/]+)?\.ts$/.test(to) ||
      (typeOnly && to.endsWith("/store.ts"))
    );
  switch (mine) {
    case "testing":
    case "watch":
      // As anybody outside: a helper that needs more than the public doors would show that these are too narrow.
      return transactions.includes(theirs) || theirs === "holdfast.ts" || entrances.has(to);
    default:
      // What puts all of it together.
      return (
        mine.endsWith(".ts") &&
        theirs !== "testing" &&
        !theirs.startsWith("clients") &&
        !theirs.startsWith("engines") &&
        (mine === "index.ts" || (theirs !== "index.ts" && theirs !== "sharded.ts"))
      );
  }
}

function wrongDirections(tree: Tree, entrances: ReadonlySet<string>): string[] {
  return allImports(tree)
    .filter(({ from, to, typeOnly }) => to !== undefined && !mayImport(from, to, typeOnly, entrances))
    .map(show);
}

const builtins = new Set(builtinModules.map((name) => `node:${name.replace(/^node:/, "")}`));

/** Not as types either: a package that is not installed would break the types of everybody else. */
function foreignPackages(tree: Tree): string[] {
  return allImports(tree)
    .filter(({ specifier, to }) => to === undefined && !builtins.has(specifier ?? ""))
    .map(show);
}

function notReExports(tree: Tree, file: string): string[] {
  const body = parse(file, tree.get(file) ?? "").body as Node[];
  return body
    .filter(({ type, source }) => !(type.startsWith("Export") && source))
    .map(({ type }) => `${file} holds a ${type}`);
}

const families =
  /postgres|mysql|mariadb|sqlite|duckdb|mssql|mongo|pglite|libsql|prisma|drizzle|kysely|knex|typeorm|mikro|sequelize/i;

/** Comments are not part of the tree: these may name what they like. */
function namedFamilies(tree: Tree): string[] {
  const found: string[] = [];
  for (const [file, text] of tree) {
    for (const node of nodes(parse(file, text))) {
      const words =
        node.type === "TemplateElement"
          ? (node.value as { raw: string }).raw
          : node.type === "Literal"
            ? node.value
            : node.name;
      if (typeof words === "string" && families.test(words)) found.push(`${file} says ${words}`);
    }
  }
  return found;
}

/** `types`: also those of which nothing is left at run time. */
function cycles(tree: Tree, types = false): string[] {
  const edges = new Map<string, string[]>();
  for (const { from, to, typeOnly } of allImports(tree))
    if (to !== undefined && (types || !typeOnly)) edges.set(from, [...(edges.get(from) ?? []), to]);
  const done = new Set<string>();
  const found: string[] = [];
  const visit = (file: string, path: readonly string[]) => {
    const start = path.indexOf(file);
    if (start >= 0) {
      found.push([...path.slice(start), file].join(" → "));
      return;
    }
    if (done.has(file)) return;
    for (const next of edges.get(file) ?? []) visit(next, [...path, file]);
    done.add(file);
  };
  for (const file of edges.keys()) visit(file, []);
  return found;
}

/** Everybody but the library itself uses it as applications do. */
function backDoors(tree: Tree, doors: ReadonlySet<string>): string[] {
  return allImports(tree)
    .filter(({ from, to, specifier }) => {
      if (specifier === "holdfast" || specifier?.startsWith("holdfast/")) return !doors.has(specifier);
      if (to === undefined || !to.startsWith(`${library}/`)) return false;
      // Unit tests are about single modules.
      if (from.startsWith("test/unit/")) return false;
      // They stand for engines and clients to come, and see what these would see.
      if (from.startsWith("test/sketches/")) return !/^(seam|waiting|context|engines\/.+)$/.test(layerOf(to));
      return true;
    })
    .map(show);
}

// The tree as it is.

function read(folder: string, skip: readonly string[] = []): [string, string][] {
  if (!existsSync(join(root, folder))) return [];
  return readdirSync(join(root, folder), { withFileTypes: true }).flatMap((entry): [string, string][] => {
    const path = `${folder}/${entry.name}`;
    if (["node_modules", "dist", ...skip].includes(entry.name)) return [];
    if (entry.isDirectory()) return read(path, skip);
    return /\.[cm]?ts$/.test(path) ? [[path, readFileSync(join(root, path), "utf8")]] : [];
  });
}

const sources: Tree = new Map(read(src));
const outside: Tree = new Map(
  ["packages/cli/src", "bench/src", "examples", "test", "scripts"].flatMap((folder) =>
    read(folder, ["generated"]),
  ),
);

interface Manifest {
  readonly exports: Readonly<Record<string, string | Readonly<Record<string, string>>>>;
  readonly [field: string]: unknown;
}
const manifest = JSON.parse(readFileSync(join(root, library, "package.json"), "utf8")) as Manifest;
const doors = new Set(
  Object.keys(manifest.exports).map((subpath) => normalize(joinUrl("holdfast", subpath))),
);
/** The source files behind them. */
const entrances = new Set(
  Object.values(manifest.exports).flatMap((target) =>
    typeof target === "string" ? [] : [normalize(joinUrl(library, target["holdfast-source"] ?? ""))],
  ),
);

const sharedCode: Tree = new Map(
  [...sources].filter(([file]) =>
    [
      ...Object.keys(rooms),
      "testing",
      "holdfast.ts",
      "options.ts",
      "migrations.ts",
      "sharded.ts",
      "index.ts",
    ].includes(layerOf(file)),
  ),
);

/** A tree of one file, for rules to fail on. */
function only(file: string, text: string): Tree {
  return new Map([[file, text]]);
}

test("there is something to look at", () => {
  expect(sources.size).toBeGreaterThan(30);
  expect(outside.size).toBeGreaterThan(20);
  expect(allImports(sources).length).toBeGreaterThan(100);
  const astray = allImports(sources).filter(({ to }) => to !== undefined && !sources.has(to));
  expect(astray.map(show)).toEqual([]);
});

describe("directions inside the library", () => {
  test("hold", () => {
    expect(wrongDirections(sources, entrances)).toEqual([]);
  });

  test.each([
    ["seam/a.ts", "../transaction/scope.ts"],
    ["seam/a.ts", "../locks/hold.ts"],
    ["seam/a.ts", "../engines/x/index.ts"],
    ["seam/a.ts", "../clients/pg/connection.ts"],
    ["seam/a.ts", "../holdfast.ts"],
    ["seam/a.ts", "../jobs/store.ts"],
    ["seam/a.ts", "../jobs/decide.ts"],
    ["input/a.ts", "../transaction/scope.ts"],
    ["waiting/a.ts", "../transaction/scope.ts"],
    ["context/a.ts", "../events/events.ts"],
    ["events/a.ts", "../transaction/scope.ts"],
    ["transaction/a.ts", "../locks/hold.ts"],
    ["transaction/a.ts", "../batch/batcher.ts"],
    ["transaction/a.ts", "../shards/shards.ts"],
    ["shards/a.ts", "../quota/quota.ts"],
    ["batch/a.ts", "../quota/quota.ts"],
    ["time/a.ts", "../schedule/ticks.ts"],
    ["quota/a.ts", "../stock/stock.ts"],
    ["quota/a.ts", "../testing/index.ts"],
    ["locks/a.ts", "../holdfast.ts"],
    ["locks/a.ts", "../sharded.ts"],
    ["locks/a.ts", "../engines/x/index.ts"],
    ["elsewhere/a.ts", "../locks/hold.ts"],
    ["engines/x/a.ts", "../y/index.ts"],
    ["engines/x/a.ts", "../../clients/pg/index.ts"],
    ["engines/x/a.ts", "../../clients/pg/connection.ts"],
    ["engines/x/a.ts", "../../locks/hold.ts"],
    ["engines/x/a.ts", "../../transaction/scope.ts"],
    ["engines/x/a.ts", "../../batch/batcher.ts"],
    ["engines/x/a.ts", "../../jobs/store.ts"],
    ["engines/sql/a.ts", "../x/index.ts"],
    ["clients/a/index.ts", "../pg/index.ts"],
    ["clients/a/index.ts", "../../sharded.ts"],
    ["clients/a/index.ts", "../../quota/quota.ts"],
    ["testing/a.ts", "../engines/x/index.ts"],
    ["testing/cases/a.ts", "../../locks/hold.ts"],
    ["watch/a.ts", "../locks/hold.ts"],
    ["holdfast.ts", "./engines/x/index.ts"],
    ["holdfast.ts", "./index.ts"],
    ["holdfast.ts", "./sharded.ts"],
    ["sharded.ts", "./engines/x/index.ts"],
    ["sharded.ts", "./clients/pg/index.ts"],
    ["sharded.ts", "./index.ts"],
    ["index.ts", "./clients/pg/index.ts"],
  ])("%s may not import %s", (file, specifier) => {
    const ways = [
      `import { a } from "${specifier}";`,
      `export * from "${specifier}";`,
      `const a = await import("${specifier}");`,
    ];
    const unseen = ways.filter((way) => wrongDirections(only(`${src}/${file}`, way), entrances).length !== 1);
    expect(unseen).toEqual([]);
  });

  test.each([
    ["seam/a.ts", `import type { A } from "../holdfast.ts";`],
    ["seam/a.ts", `let a: import("../holdfast.ts").A;`],
    ["seam/a.ts", `/* */ import {\n  a, // from "./b.ts"\n} from "../holdfast.ts";`],
  ])("%s may not: %s", (file, statement) => {
    expect(wrongDirections(only(`${src}/${file}`, statement), entrances)).toHaveLength(1);
  });

  test.each([
    ["engines/x/a.ts", `import type { A } from "../../jobs/store.ts";`],
    ["engines/x/a.ts", `import { a } from "../sql/jobs.ts"; import { b } from "../../jobs/decide.ts";`],
    ["seam/a.ts", `import type { A } from "../jobs/store.ts";`],
    ["engines/x/a.ts", `import { a } from "./b.ts"; import { c } from "../../seam/c.ts";`],
    [
      "clients/a/index.ts",
      `import { a } from "../../engines/x/index.ts"; import { b } from "../b/connection.ts";`,
    ],
    ["testing/cases/a.ts", `import { a } from "../../holdfast.ts"; import { b } from "../../index.ts";`],
    ["quota/a.ts", `import { a } from "../time/windows.ts"; import { b } from "../seam/b.ts";`],
    ["sharded.ts", `import { a } from "./holdfast.ts"; import type { B } from "./locks/b.ts";`],
    ["seam/a.ts", `// import { a } from "../holdfast.ts"\nconst text = 'import "../holdfast.ts"';`],
  ])("%s may: %s", (file, statement) => {
    expect(wrongDirections(only(`${src}/${file}`, statement), entrances)).toEqual([]);
  });

  test("no module is, by way of others, imported by itself", () => {
    expect(cycles(sources)).toEqual([]);
    const three = (last: string): Tree =>
      new Map([
        ["a.ts", `import "./b.ts";`],
        ["b.ts", `export { c } from "./c.ts";`],
        ["c.ts", last],
      ]);
    expect(cycles(three(`import { type A } from "./a.ts";`))).toEqual(["a.ts → b.ts → c.ts → a.ts"]);
    expect(cycles(three(`import type { A } from "./a.ts";`))).toEqual([]);
  });

  test("nor do their types go in a circle, but for the seam and what it is made of", () => {
    const through = (file: string) => new Map([...sources].filter(([path]) => !path.endsWith(file)));
    // What an engine implements names the contracts, each of which is about connections of the same file.
    expect(cycles(through("/seam/database.ts"), true)).toEqual([]);
    const two: Tree = new Map([
      ["a.ts", `import type { B } from "./b.ts";`],
      ["b.ts", `import type { A } from "./a.ts";`],
    ]);
    expect(cycles(two, true)).toHaveLength(1);
  });

  test("index.ts re-exports, and does nothing else", () => {
    expect(notReExports(sources, `${src}/index.ts`)).toEqual([]);
    expect(
      notReExports(only("index.ts", `export { a } from "./a.ts"; export const b = 1;`), "index.ts"),
    ).toEqual(["index.ts holds a ExportNamedDeclaration"]);
    expect(notReExports(only("index.ts", `import "./a.ts";`), "index.ts")).toHaveLength(1);
  });
});

describe("the library stands alone", () => {
  test("it imports nothing but itself and what Node brings, types included", () => {
    expect(foreignPackages(sources)).toEqual([]);
    const ways = [
      `import { Pool } from "pg";`,
      `import type { Pool } from "pg";`,
      `let pool: import("pg").Pool;`,
      `await import(name);`,
      `import fs from "fs";`,
      `import x = require("pg");`,
    ];
    expect(ways.filter((way) => foreignPackages(only("a.ts", way)).length !== 1)).toEqual([]);
    expect(foreignPackages(only("a.ts", `import { readFile } from "node:fs/promises";`))).toEqual([]);
  });

  test("it depends on no package", () => {
    const fields = ["dependencies", "optionalDependencies", "bundleDependencies", "bundledDependencies"];
    expect(fields.filter((field) => field in manifest)).toEqual([]);
    // npm installs a peer that is not optional.
    const peers = Object.keys(manifest["peerDependencies"] ?? {});
    const optional = Object.entries(
      (manifest["peerDependenciesMeta"] ?? {}) as Record<string, { optional?: boolean }>,
    )
      .filter(([, meta]) => meta.optional)
      .map(([name]) => name);
    expect(optional.toSorted()).toEqual(peers.toSorted());
  });

  test("shared code names no family of databases and no client", () => {
    expect(sharedCode.size).toBeGreaterThan(20);
    expect(namedFamilies(sharedCode)).toEqual([]);
    const ways = [
      `if (engine === "postgres") a();`,
      "const text = `is ${name} MariaDB?`;",
      `const isSqlite = true;`,
      `const a = { prisma: 1 };`,
      `class A { #mongoSession = 1; }`,
    ];
    expect(ways.filter((way) => namedFamilies(only("a.ts", way)).length !== 1)).toEqual([]);
    expect(namedFamilies(only("a.ts", `// PostgreSQL\n/** Prisma */ const a = 1;`))).toEqual([]);
  });
});

test("no module of the command is, by way of others, imported by itself, types included", () => {
  const command = new Map([...outside].filter(([file]) => file.startsWith("packages/cli/src/")));
  expect(command.size).toBeGreaterThan(20);
  expect(cycles(command, true)).toEqual([]);
});

describe("everybody else", () => {
  test("uses the library through its public doors", () => {
    expect(backDoors(outside, doors)).toEqual([]);
    const into = (path: string) => `import { key } from "${path}";`;
    expect(backDoors(only("test/a.test.ts", into("../packages/holdfast/src/index.ts")), doors)).toHaveLength(
      1,
    );
    expect(
      backDoors(only("bench/src/a.ts", into("../../packages/holdfast/dist/index.js")), doors),
    ).toHaveLength(1);
    expect(backDoors(only("packages/cli/src/a.ts", into("../../holdfast/src/index.ts")), doors)).toHaveLength(
      1,
    );
    expect(backDoors(only("examples/a.ts", into("holdfast/seam/key")), doors)).toHaveLength(1);
    expect(backDoors(only("examples/a.ts", into("holdfast/pg")), doors)).toEqual([]);
    expect(
      backDoors(only("test/unit/a.test.ts", into("../../packages/holdfast/src/seam/key.ts")), doors),
    ).toEqual([]);
    const sketch = (path: string) =>
      backDoors(only("test/sketches/a.ts", into(`../../${src}/${path}`)), doors);
    expect(sketch("seam/key.ts")).toEqual([]);
    expect(sketch("holdfast.ts")).toHaveLength(1);
  });
});

const clients = [...new Set([...sources.keys()].map(layerOf))]
  .filter((layer) => layer.startsWith("clients/"))
  .map((layer) => relative("clients", layer));
/** `engines/sql` is no engine, but what several share. */
const engines = [...new Set([...sources.keys()].map(layerOf))].filter(
  (layer) => layer.startsWith("engines/") && layer !== "engines/sql",
);

function pages(folder: string): string[] {
  return existsSync(join(root, folder)) ? readdirSync(join(root, folder)) : [];
}

describe.each(clients)("the client %s", (name) => {
  test("is exported", () => {
    expect(manifest.exports[`./${name}`]).toEqual({
      "holdfast-source": `./src/clients/${name}/index.ts`,
      types: `./dist/clients/${name}/index.d.ts`,
      default: `./dist/clients/${name}/index.js`,
    });
  });

  test("is one of the tested backends", () => {
    // Imported when it is opened; what is taken from it is called `from…`.
    const programs = [...outside]
      .filter(([file]) => /^test\/backends(\/.*)?\.ts$/.test(file))
      .flatMap(([file, text]) => [...nodes(parse(file, text))]);
    const imported = programs.some(
      ({ type, source }) =>
        type === "ImportExpression" && (source as { value?: string }).value === `holdfast/${name}`,
    );
    const maker = `from${name.replaceAll(/(?:^|-)(.)/g, (_, letter: string) => letter.toUpperCase())}`;
    const called = programs
      .filter(({ type }) => type === "CallExpression")
      .map(({ callee }) => (callee as { name?: string }).name);
    expect([imported, called.includes(maker)], maker).toEqual([true, true]);
  });

  test("has a page", () => {
    expect(pages("docs/adapters")).toContain(`${name}.md`);
  });
});

test.each(engines)("%s has a page", (engine) => {
  expect(pages("docs/engines")).toContain(`${engine.replace("engines/", "")}.md`);
});
