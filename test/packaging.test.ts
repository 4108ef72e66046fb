/**
 * What people install: the library is built, packed and put into projects that know nothing of this repository. The
 * build is one of a copy, so that nothing that was built before, or is being built meanwhile, gets into the package.
 */
import { execFile } from "node:child_process";
import {
  cpSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { normalize } from "node:path/posix";
import { fileURLToPath } from "node:url";
import { Client } from "pg";
import { publint } from "publint";
import { formatMessage } from "publint/utils";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { pack } from "../scripts/pack.ts";
import { createDatabase, unavailable } from "./harness/databases.ts";

const root = fileURLToPath(new URL("..", import.meta.url));
const library = join(root, "packages/holdfast");

interface Manifest {
  readonly name: string;
  readonly version: string;
  readonly bin: Readonly<Record<string, string>>;
  readonly exports: Readonly<Record<string, string | Readonly<Record<string, string>>>>;
}

let workshop: string;
let tarball: string;
/** Paths in the package. */
let files: string[];
/** A project that has the package, and what the repository has besides. */
let project: string;
/** A project that has the package and nothing else. */
let bare: string;
let manifest: Manifest;

interface Outcome {
  readonly code: number;
  readonly output: string;
  readonly errors: string;
}

/** As in a shell of somebody else: nothing of this test run is handed on. */
function run(
  cwd: string,
  file: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv = {},
): Promise<Outcome> {
  const { NODE_OPTIONS: _, ...rest } = process.env;
  return new Promise((resolve) => {
    const options = { cwd, env: { ...rest, NO_COLOR: "1", ...env }, timeout: 100_000 };
    execFile(file, args, options, (error, stdout, stderr) => {
      const code = error ? (typeof error.code === "number" ? error.code : -1) : 0;
      resolve({ code, output: stdout, errors: stderr });
    });
  });
}

async function must(...call: Parameters<typeof run>): Promise<string> {
  const { code, output, errors } = await run(...call);
  if (code !== 0) throw new Error(`${call[1]} ${call[2].join(" ")} ended with ${code}\n${output}${errors}`);
  return output;
}

const tool = (name: string) => join(root, "node_modules/.bin", name);

function newProject(name: string): string {
  const folder = join(workshop, name);
  mkdirSync(join(folder, "node_modules/holdfast"), { recursive: true });
  writeFileSync(join(folder, "package.json"), JSON.stringify({ name, private: true, type: "module" }));
  return folder;
}

beforeAll(async () => {
  workshop = realpathSync(mkdtempSync(join(tmpdir(), "holdfast-package-")));
  [tarball = ""] = pack(["holdfast"], join(workshop, "packed"));
  [project, bare] = [newProject("project"), newProject("bare")];
  for (const folder of [project, bare])
    await must(folder, "tar", ["-xzf", tarball, "-C", "node_modules/holdfast", "--strip-components=1"]);
  for (const name of readdirSync(join(root, "node_modules")))
    if (name !== "holdfast" && name !== "@holdfast" && !name.startsWith("."))
      symlinkSync(join(root, "node_modules", name), join(project, "node_modules", name));
  const installed = join(bare, "node_modules/holdfast");
  files = readdirSync(installed, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name).slice(installed.length + 1));
  manifest = JSON.parse(readFileSync(join(installed, "package.json"), "utf8")) as Manifest;
}, 600_000);

afterAll(() => rmSync(workshop, { recursive: true, force: true }));

function read(file: string): string {
  return readFileSync(join(bare, "node_modules/holdfast", file), "utf8");
}

function subpaths(): string[] {
  return Object.keys(manifest.exports).map((subpath) => normalize(`holdfast/${subpath}`));
}

describe("the package", () => {
  test("has nothing for publint to say", async () => {
    const data = readFileSync(tarball);
    const { messages, pkg } = await publint({
      pack: { tarball: data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength) },
      strict: true,
      level: "suggestion",
    });
    expect(messages.map((message) => formatMessage(message, pkg, { color: false }))).toEqual([]);
  });

  test("has types that resolve, for whoever imports ES modules", async () => {
    const { code, output } = await run(bare, tool("attw"), [tarball, "--profile", "esm-only", "--no-color"]);
    // Lines of what was not asked for are marked so; a problem in any other makes it fail.
    expect(
      output.split("\n").filter((line) => /[💀🥴❌🎭👺🐛⚠🤨🚭]/u.test(line) && !line.includes("(ignored")),
    ).toEqual([]);
    expect(code).toBe(0);
    const checked = subpaths().filter((subpath) => !subpath.endsWith(".json"));
    expect(checked.filter((subpath) => !output.includes(`"${subpath}"`))).toEqual([]);
  });

  test("brings what it should and nothing else", () => {
    expect(files).toEqual(
      expect.arrayContaining(["LICENSE", "README.md", "package.json", "bin/holdfast.js"]),
    );
    expect(files).toEqual(expect.arrayContaining(["dist/index.js", "dist/index.d.ts", "src/index.ts"]));
    const folders = new Set(files.map((file) => (file.includes("/") ? file.split("/")[0] : ".")));
    expect(folders).toEqual(new Set([".", "bin", "dist", "src"]));
    expect(files.filter((file) => !file.includes("/")).toSorted()).toEqual([
      "LICENSE",
      "README.md",
      "package.json",
    ]);
    expect(
      files.filter((file) =>
        /\.(test|spec|bench)\.|(^|\/)(test|tests|__tests__|scratch|fixtures)\//.test(file),
      ),
    ).toEqual([]);
    expect(files.filter((file) => !/\.(ts|js|map|md|json)$|^LICENSE$/.test(file))).toEqual([]);
  });

  test("was built from each of its sources, once", () => {
    const sources = files.filter((file) => file.startsWith("src/")).map((file) => file.slice(4, -3));
    expect(sources.length).toBeGreaterThan(30);
    const built = sources.flatMap((name) =>
      [".js", ".js.map", ".d.ts", ".d.ts.map"].map((end) => `dist/${name}${end}`),
    );
    expect(files.filter((file) => file.startsWith("dist/")).toSorted()).toEqual(built.toSorted());
  });

  test("has every protection on, and no way to turn one off", () => {
    // Constants of a module: nobody who imports it can change them.
    const rest = read("dist/seam/protections.js")
      .replaceAll(/\/\*\*[\s\S]*?\*\//g, "")
      .replaceAll(/^export const \w+ = true;$/gm, "")
      .replaceAll(/^\/\/# sourceMappingURL=.*$/gm, "");
    expect(rest.trim()).toBe("");
    expect(read("dist/seam/protections.js").match(/ = true;$/gm)?.length).toBeGreaterThanOrEqual(20);
    expect(files.filter((file) => read(file).includes("HOLDFAST_MUTANT"))).toEqual([]);
  });

  test("depends on nothing", () => {
    for (const field of ["dependencies", "optionalDependencies", "bundleDependencies", "bundledDependencies"])
      expect(manifest).not.toHaveProperty(field);
    // Nothing runs on the machine of whoever installs it.
    const scripts = Object.keys((manifest as { scripts?: object }).scripts ?? {});
    expect(scripts.filter((name) => /^(pre|post)?install$|^prepare$/.test(name))).toEqual([]);
  });

  test("has every file that it exports", () => {
    const targets = Object.values(manifest.exports).flatMap((target) =>
      typeof target === "string" ? [target] : Object.values(target),
    );
    expect(targets.length).toBeGreaterThan(8);
    const named = [...targets, ...Object.values(manifest.bin)].map((target) => normalize(target));
    expect(named.filter((target) => !files.includes(target))).toEqual([]);
  });

  test("has types that lead to nothing outside of it", () => {
    const declarations = files.filter((file) => file.endsWith(".d.ts"));
    const specifiers = declarations.flatMap((file) =>
      [...read(file).matchAll(/(?:from|import|require)\s*\(?\s*["']([^"']+)["']/g)].map(
        ([, specifier = ""]) => ({ file, specifier }),
      ),
    );
    expect(specifiers.length).toBeGreaterThan(30);
    const astray = specifiers.filter(({ file, specifier }) => {
      if (specifier.startsWith("node:")) return false;
      const target = normalize(join(file, "..", specifier));
      // With either ending the declarations beside are meant.
      return !(/\.[jt]s$/.test(specifier) && files.includes(target.replace(/\.[jt]s$/, ".d.ts")));
    });
    expect(astray).toEqual([]);
    expect(declarations.filter((file) => /node_modules|\/src\/|\/\/\/ <reference/.test(read(file)))).toEqual(
      [],
    );
  });

  test("has maps that lead to the sources it brings", () => {
    const maps = files.filter((file) => file.endsWith(".map"));
    expect(maps.length).toBeGreaterThan(60);
    const lost = maps.filter((file) => {
      const { sources, sourceRoot = "" } = JSON.parse(read(file)) as {
        sources: string[];
        sourceRoot?: string;
      };
      return !sources.every((source) => files.includes(normalize(join(file, "..", sourceRoot, source))));
    });
    expect(lost).toEqual([]);
  });
});

describe("in a project that has nothing else", () => {
  test("everything can be imported, and is what was built", async () => {
    const script = `
      const found = {};
      for (const name of ${JSON.stringify(subpaths().filter((name) => !name.endsWith(".json")))})
        found[name] = [import.meta.resolve(name), Object.keys(await import(name))];
      console.log(JSON.stringify(found));`;
    const output = await must(bare, process.execPath, ["--input-type=module", "--eval", script]);
    const found = JSON.parse(output) as Record<string, [string, string[]]>;
    expect(found["holdfast"]?.[1]).toContain("holdfast");
    expect(found["holdfast/pg"]?.[1]).toEqual(["fromPg"]);
    for (const [url, names] of Object.values(found)) {
      expect(url).toContain("/bare/node_modules/holdfast/dist/");
      expect(names).not.toEqual([]);
    }
  });

  test("what is not exported cannot be imported", async () => {
    for (const name of ["holdfast/seam/key", "holdfast/dist/seam/key.js", "holdfast/src/index.ts"]) {
      const { code, errors } = await run(bare, process.execPath, [
        "--input-type=module",
        "--eval",
        `import "${name}"`,
      ]);
      expect(code).toBe(1);
      expect(errors).toContain("ERR_PACKAGE_PATH_NOT_EXPORTED");
    }
  });

  test("the command says in one line how to get it", async () => {
    const bin = join("node_modules/holdfast", manifest.bin["holdfast"] as string);
    expect(read(manifest.bin["holdfast"] as string)).toMatch(/^#!\/usr\/bin\/env node\n/);
    for (const args of [[], ["demo"], ["--help"]]) {
      const { code, output, errors } = await run(bare, process.execPath, [bin, ...args]);
      expect(code).toBe(2);
      expect(output).toBe("");
      expect(errors.trimEnd().split("\n")).toHaveLength(1);
      expect(errors).toContain("npm install --save-dev @holdfast/cli");
    }
  });
});

describe("npm install", () => {
  /** Packages of these names and versions, and nothing in them: npm looks at no more, and the network is not needed. */
  async function install(name: string, others: Readonly<Record<string, string>>): Promise<Outcome> {
    const folder = join(workshop, name);
    const dependencies: Record<string, string> = { holdfast: `file:${tarball}` };
    for (const [other, version] of Object.entries(others)) {
      const source = join(folder, "packages", other.replace("/", "+"));
      mkdirSync(source, { recursive: true });
      writeFileSync(join(source, "package.json"), JSON.stringify({ name: other, version }));
      const packed = JSON.parse(await must(source, "npm", ["pack", "--json", "--offline"])) as [
        { filename: string },
      ];
      dependencies[other] = `file:${join(source, packed[0].filename)}`;
    }
    mkdirSync(folder, { recursive: true });
    writeFileSync(join(folder, "package.json"), JSON.stringify({ name, private: true, dependencies }));
    return run(folder, "npm", ["install", "--offline", "--package-lock-only", "--no-audit", "--no-fund"]);
  }

  test.each([
    ["alone", {}],
    ["beside-older-majors", { "@prisma/client": "6.19.3", typeorm: "0.3.31", pg: "8.11.0" }],
    ["beside-others", { kysely: "0.20.0", "@mikro-orm/core": "5.0.0", "drizzle-orm": "1.0.0-beta.1" }],
  ])("goes through %s", async (name, others) => {
    const { code, errors } = await install(name, others);
    expect(errors).not.toContain("ERESOLVE");
    expect(code, errors).toBe(0);
    const { packages } = JSON.parse(readFileSync(join(workshop, name, "package-lock.json"), "utf8")) as {
      packages: Record<string, unknown>;
    };
    // Nothing that nobody asked for.
    expect(Object.keys(packages).filter((place) => place !== "")).toEqual(
      ["holdfast", ...Object.keys(others)].map((each) => `node_modules/${each}`).toSorted(),
    );
  });
});

/** Blocks of a page, in their order: of the README that npm shows, unless another is meant. */
const blocks = (language: string, page = join(library, "README.md")): string[] =>
  [...readFileSync(page, "utf8").matchAll(new RegExp(`^\`\`\`${language}\\n(.*?)^\`\`\`$`, "gms"))].map(
    ([, code = ""]) => code,
  );

/** What stands in the table of the README, as a program. */
function lines(): string {
  const table = readFileSync(join(library, "README.md"), "utf8")
    .split("\n")
    .filter((line) => /^\| (?:a|credits|stock|jobs)\b.*\[`/.test(line))
    .map((line) => /\[`(.*)`\]\(/.exec(line)?.[1] ?? "");
  expect(table).toHaveLength(7);
  // What was left out there.
  const written = table.map((line) => `{ ${line.replace("{ … }", "{ void tx; }").replace("…", "")}; }`);
  return `
import { DatabaseSync } from "node:sqlite";
import { type Transaction, holdfast, key, versioned } from "holdfast";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";

interface Article { id: number; title: string; version: number }
const db = new DatabaseSync("table.db");
db.exec("CREATE TABLE article (id integer PRIMARY KEY, title text, version integer NOT NULL DEFAULT 0)");
db.exec("INSERT INTO article (id, title) VALUES (1, ' Hello ')");
db.close();
const hf = holdfast(fromNodeSqlite(() => new DatabaseSync("table.db")));
await hf.migrate();
await stock(hf).increase("CAP", 5);
const credits = quota(hf, { name: "credits", limit: 0 });
const emails = queue<{ to: string }>(hf, "emails");
const [userId, orderId, to, id, tokens] = ["ada", "1001", "ada@example.com", 1, 700];
await credits.grant(userId, 1000);
const sent: string[] = [];
const send = async (mail: { to: string }): Promise<void> => void sent.push(mail.to);
const report = async (tick: Date): Promise<void> => void tick;
async function all(outer: Transaction<unknown>): Promise<void> {
  const tx = outer;
${written.filter((line) => line.includes("emails")).join("\n")}
}
await hf.transaction(all);
${written.filter((line) => !line.includes("emails")).join("\n")}
while (sent.length === 0) await new Promise((resolve) => setTimeout(resolve, 20));
const [row] = await hf.transaction((tx) => tx.rows<Article>("article", [1]));
console.log(JSON.stringify({
  uploads: (await quota(hf, { name: "uploads", limit: 100, per: "day" }).peek(userId)).used,
  credits: (await credits.peek(userId)).credit,
  caps: (await stock(hf).level("CAP"))?.onHand,
  sent,
  article: [row?.title, row?.version],
}));
await hf.close();
`;
}

const prismaFile = "upload.ts";
const pgFile = "first-example.ts";
const proofFile = "proof.ts";

describe("the README", () => {
  const file = pgFile;

  beforeAll(() => {
    const [prisma, pg] = blocks("ts");
    if (!prisma || !pg) throw new Error("packages/holdfast/README.md has two ```ts blocks");
    const proof = blocks("ts", join(root, "docs/races.md")).find((code) => code.includes("naive("));
    if (!proof) throw new Error("docs/races.md has no program with the race of the README");
    cpSync(join(root, "test/generated/prisma"), join(project, "generated/prisma"), { recursive: true });
    writeFileSync(join(project, prismaFile), prisma);
    writeFileSync(join(project, pgFile), pg);
    writeFileSync(join(project, proofFile), proof);
    writeFileSync(join(project, "table.ts"), lines());
  });

  const check = (name: string, ...flags: string[]) =>
    run(project, tool("tsc"), ["--strict", "--noEmit", "--types", "node", ...flags, name]);
  const asNode = ["--module", "nodenext", "--skipLibCheck"];

  test.each([
    ["for Node", asNode],
    ["for a bundler", ["--module", "esnext", "--moduleResolution", "bundler", "--skipLibCheck"]],
  ])("compiles %s", async (_, flags) => {
    // With Prisma the client is one of the reader's own files, imported as such.
    const own = ["--allowImportingTsExtensions", "--target", "es2024", prismaFile, proofFile, "table.ts"];
    expect(await check(file, ...flags, ...own)).toEqual({ code: 0, output: "", errors: "" });
  });

  test("the types hold for whoever looks into them, too", async () => {
    const imports = subpaths()
      .filter((name) => !name.endsWith(".json"))
      .map((name, i) => `import * as all${i} from "${name}";\nvoid all${i};\n`);
    writeFileSync(join(project, "all.ts"), imports.join(""));
    const flags = ["--module", "nodenext", "--skipLibCheck", "false", "--exactOptionalPropertyTypes"];
    expect(await check("all.ts", ...flags)).toEqual({ code: 0, output: "", errors: "" });
  });

  test("is compiled against the package: a wrong call is seen", async () => {
    writeFileSync(
      join(project, "wrong.ts"),
      `import { holdfast, key } from "holdfast";\nimport { fromPg } from "holdfast/pg";\nimport { Pool } from "pg";\n` +
        `const hf = holdfast(fromPg(new Pool()));\nawait hf.transaction({ lock: "upload" }, async () => {});\nkey(1);\n`,
    );
    const { code, output } = await check("wrong.ts", ...asNode);
    expect(code).not.toBe(0);
    expect(output.match(/error TS/g)).toHaveLength(2);
    expect(output).toMatch(/wrong\.ts\(5,/);
  });

  test("what it says of each problem does it", async () => {
    const output = await must(project, process.execPath, ["table.ts"]);
    expect(JSON.parse(output)).toEqual({
      uploads: 1,
      credits: 300,
      caps: 3,
      sent: ["ada@example.com"],
      article: ["Hello", 1],
    });
  });

  const uploads = `CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes int NOT NULL)`;

  async function onPostgres(
    skip: (condition: boolean, note?: string) => void,
    body: (url: string, client: Client) => Promise<void>,
  ): Promise<void> {
    const why = unavailable("postgres");
    skip(why !== undefined, why);
    const database = await createDatabase("postgres");
    const client = new Client({ connectionString: database.url });
    try {
      await client.connect();
      await client.query(uploads);
      await body(database.url, client);
    } finally {
      await client.end();
      await database.drop();
    }
  }

  test("pg: it prints what it says, the second time too", ({ skip }) =>
    onPostgres(skip, async (url) => {
      const said = /^It prints `(.*?)`/m.exec(readFileSync(join(library, "README.md"), "utf8"))?.[1];
      for (let time = 1; time <= 2; time++) {
        const outcome = await run(project, process.execPath, [file], { DATABASE_URL: url });
        expect(outcome).toMatchObject({ code: 0, errors: "" });
        expect(outcome.output.trim()).toBe(said);
      }
    }));

  test("Prisma: exact in three processes", ({ skip }) =>
    onPostgres(skip, async (url, client) => {
      const script = `import { upload } from "./${prismaFile}";
        const answers = await Promise.all(Array.from({ length: 20 }, () => upload("ada", 10)));
        console.log(answers.filter(Boolean).length);
        process.exit();`;
      writeFileSync(join(project, "uploads.ts"), script);
      const env = { DATABASE_URL: url };
      const said = await Promise.all(
        [1, 2, 3].map(() => must(project, process.execPath, ["uploads.ts"], env)),
      );
      expect(said.reduce((sum, text) => sum + Number(text), 0)).toBe(10);
      const { rows } = await client.query("SELECT sum(bytes)::int AS bytes FROM upload");
      expect(rows).toEqual([{ bytes: 100 }]);
    }));

  test("the proof: the race is found as it says, and is gone with the lock", ({ skip }) =>
    onPostgres(skip, async (url, client) => {
      await client.query("DROP TABLE upload; CREATE TABLE upload (bytes int NOT NULL)");
      const env = { DATABASE_URL: url };
      const { code, errors, output } = await run(project, process.execPath, [proofFile], env);
      expect(code, output).toBe(1);
      const [said = ""] = blocks("text");
      expect(said).not.toBe("");
      // Its long lines are broken for people.
      const words = (text: string): string => text.replaceAll(/\s+/g, " ").trim();
      expect(words(errors)).toContain(words(said));
      const fixed = readFileSync(join(project, proofFile), "utf8")
        .replace("const client = await pool.connect();", "")
        .replace('await client.query("BEGIN");', "")
        .replace(
          "const { rows } = await client",
          'await hf.transaction({ lock: key("upload", "ada") }, async ({ client }) => { const { rows } = await client',
        )
        .replace('await client.query("COMMIT");', "});")
        .replace("client.release();", "")
        .replace("const pool", 'import { holdfast, key } from "holdfast";\nconst pool')
        .replace("async function naive", "const hf = holdfast(fromPg(pool));\nasync function naive");
      writeFileSync(join(project, "fixed.ts"), `${fixed}process.exit();\n`);
      const green = await must(project, process.execPath, ["fixed.ts"], env);
      const line = /it prints `(✓.*?)`/.exec(readFileSync(join(library, "README.md"), "utf8"))?.[1];
      const number = /\d+ runs/;
      expect(green.trim().replace(number, "")).toBe(line?.replace(number, ""));
    }));
});
