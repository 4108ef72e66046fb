/**
 * The guides of docs/guides, each as a project of its own: nothing but its blocks and the packed library, in an empty folder. Several
 * processes run it at the same time, and the tables say what became of it. What is imported besides is that of the repository.
 */
import { type ChildProcess, execFile, spawn } from "node:child_process";
import {
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { once } from "node:events";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { fileURLToPath } from "node:url";
import { createConnection } from "mysql2/promise";
import { Client } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { pack } from "../scripts/pack.ts";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

const root = fileURLToPath(new URL("..", import.meta.url));
const guides = join(root, "docs/guides");

/** The library is built for it, which takes its time on a busy machine. */
const packing = 600_000;

/** All projects are below it, and find there what is installed. */
let workshop: string;
/** Lines of code of each project, for whoever wants to know what it takes. */
const sizes: Record<string, number> = {};

function run(
  cwd: string,
  file: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv = {},
): Promise<string> {
  const { NODE_OPTIONS: _, ...rest } = process.env;
  const { promise, resolve, reject } = Promise.withResolvers<string>();
  const options = { cwd, env: { ...rest, NO_COLOR: "1", ...env }, timeout: 300_000 };
  execFile(file, args, options, (error, stdout, stderr) => {
    if (error) reject(new Error(`${file} ${args.join(" ")}: ${error.message}\n${stdout}${stderr}`));
    else resolve(stdout);
  });
  return promise;
}

const node = (folder: string, file: string, env: NodeJS.ProcessEnv = {}): Promise<string> =>
  run(folder, process.execPath, [file], env);

/** Writes the blocks that say which file they are. */
function project(guide: string, manifest: object = { type: "module" }): string {
  const folder = join(workshop, guide);
  mkdirSync(folder);
  writeFileSync(join(folder, "package.json"), JSON.stringify({ name: guide, private: true, ...manifest }));
  const text = readFileSync(join(guides, `${guide}.md`), "utf8");
  let lines = 0;
  for (const [, name = "", code = ""] of text.matchAll(/^```ts\n\/\/ (\S+)\n(.*?)^```$/gms)) {
    mkdirSync(dirname(join(folder, name)), { recursive: true });
    writeFileSync(join(folder, name), code);
    lines += code.split("\n").filter((line) => line.trim() !== "").length;
  }
  const [, settings] = /^```json\n(.*?)^```$/ms.exec(text) ?? [];
  if (settings !== undefined) writeFileSync(join(folder, "tsconfig.json"), settings);
  expect(lines).toBeGreaterThan(0);
  // Each block of code is in a file: none is only for show.
  expect(text.match(/^```ts$/gm)).toHaveLength(text.match(/^```ts\n\/\/ \S+\.ts$/gm)?.length ?? 0);
  sizes[guide] = lines;
  return folder;
}

async function onPostgres(
  skip: (condition: boolean, note?: string) => void,
  body: (env: { DATABASE_URL: string }, client: Client) => Promise<void>,
): Promise<void> {
  const why = unavailable("postgres");
  skip(why !== undefined, why);
  const database = await createDatabase("postgres");
  const client = new Client({ connectionString: database.url });
  try {
    await client.connect();
    await body({ DATABASE_URL: database.url }, client);
  } finally {
    await client.end();
    await database.drop();
  }
}

/** Holdfast's own tables, as `npx holdfast migrate` makes them. */
const migrate = `import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
const pool = new Pool({ connectionString: process.env.DATABASE_URL });
await holdfast(fromPg(pool)).migrate();
await pool.end();
`;

const sum = (texts: readonly string[]): number => texts.reduce((all, text) => all + Number(text), 0);

beforeAll(async () => {
  workshop = realpathSync(mkdtempSync(join(tmpdir(), "holdfast-guides-")));
  const [tarball = ""] = pack(["holdfast"], join(workshop, "packed"));
  writeFileSync(join(workshop, "package.json"), JSON.stringify({ name: "guides", private: true }));
  await run(workshop, "npm", [
    "install",
    "--offline",
    "--no-audit",
    "--no-fund",
    "--no-package-lock",
    tarball,
  ]);
  for (const name of readdirSync(join(root, "node_modules")))
    if (!existsSync(join(workshop, "node_modules", name)) && name !== "@holdfast")
      symlinkSync(join(root, "node_modules", name), join(workshop, "node_modules", name));
}, packing);

afterAll(() => {
  for (const [guide, lines] of Object.entries(sizes)) console.log(`${guide}: ${lines} lines`);
  rmSync(workshop, { recursive: true, force: true });
});

test("Next.js and Prisma: a limit per user, in three processes", ({ skip }) =>
  onPostgres(skip, async (env, client) => {
    const folder = project("nextjs-prisma-quota");
    const guide = readFileSync(join(guides, "nextjs-prisma-quota.md"), "utf8");
    // The client that the tests have generated knows the same model.
    const [, model = ""] = /^```prisma\n(.*?)^```$/ms.exec(guide) ?? [];
    const schema = readFileSync(join(root, "test/prisma/schema.prisma"), "utf8");
    for (const line of model.split("\n")) expect(schema).toContain(line);
    cpSync(join(root, "test/generated/prisma"), join(folder, "generated/prisma"), { recursive: true });
    await client.query(
      "CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes int NOT NULL)",
    );
    writeFileSync(join(folder, "migrate.ts"), migrate);
    await node(folder, "migrate.ts", env);
    writeFileSync(
      join(folder, "requests.ts"),
      `import { POST } from "./app/api/uploads/route.ts";
import { hf, uploads } from "./lib/db.ts";
// What a process does for the first time takes long on a busy machine, and others would wait for the row meanwhile.
await hf.transaction((tx) => tx.client.upload.count());
await uploads.peek("ada");
const request = () => new Request("http://localhost/api/uploads", {
  method: "POST", headers: { "x-user-id": "ada" }, body: JSON.stringify({ bytes: 5 }),
});
const answers = await Promise.all(Array.from({ length: 12 }, () => POST(request())));
const other = answers.filter(({ status }) => status !== 201 && status !== 429);
if (other.length > 0) throw new Error(String(other[0]?.status));
console.log(answers.filter(({ status }) => status === 201).length);
process.exit();
`,
    );
    const said = await Promise.all([1, 2, 3].map(() => node(folder, "requests.ts", env)));
    expect(sum(said)).toBe(10);
    expect((await client.query("SELECT count(*)::int AS rows FROM upload")).rows).toEqual([{ rows: 10 }]);
  }));

test("serverless credits: four instances with one connection each", ({ skip }) =>
  onPostgres(skip, async (env) => {
    const folder = project("serverless-credits");
    await node(folder, "migrate.ts", env);
    // Whoever is refused while others hold more than they need comes again.
    writeFileSync(
      join(folder, "calls.ts"),
      `import { handler } from "./handler.ts";
import { credits, pool } from "./credits.ts";
let paid = 0;
for (;;) {
  const answers = await Promise.all(["a", "b", "c"].map((prompt) => handler({ user: "ada", prompt })));
  paid += answers.filter(({ statusCode }) => statusCode === 200).length;
  if ((await credits.peek("ada")).remaining < 3 && (await credits.peek("ada")).held === 0) break;
}
console.log(paid);
await pool.end();
`,
    );
    const said = await Promise.all([1, 2, 3, 4].map(() => node(folder, "calls.ts", env)));
    writeFileSync(
      join(folder, "standing.ts"),
      `import { credits, pool } from "./credits.ts";
const { credit, held } = await credits.peek("ada");
const { ok } = await credits.reconcile("ada");
console.log(JSON.stringify({ credit, held, ok }));
await pool.end();
`,
    );
    // 25 were bought, each answer costs 1, and 3 are held for one: 2 are too few.
    const standing = JSON.parse(await node(folder, "standing.ts", env)) as { credit: number };
    expect(standing).toEqual({ credit: 2, held: 0, ok: true });
    expect(sum(said)).toBe(23);
  }));

describe("a queue: three workers, each job once", () => {
  let folder: string;
  let table: string;
  beforeAll(() => {
    folder = project("queue-mysql-sqlite");
    const guide = readFileSync(join(guides, "queue-mysql-sqlite.md"), "utf8");
    [, table = ""] = /^```sql\n(.*?);\n```$/ms.exec(guide) ?? [];
  });

  async function packed(engine: string, env: NodeJS.ProcessEnv): Promise<void> {
    cpSync(join(folder, `db.${engine}.ts`), join(folder, "db.ts"));
    await node(folder, "enqueue.ts", env);
    await Promise.all([1, 2, 3].map(() => node(folder, "worker.ts", env)));
  }
  const wanted = Array.from({ length: 60 }, (_, i) => i + 1);

  test("on SQLite", async () => {
    const file = join(folder, "app.db");
    const db = new DatabaseSync(file);
    db.exec(table);
    await packed("sqlite", { DATABASE_FILE: file });
    const rows = db.prepare("SELECT order_id FROM packed ORDER BY order_id").all();
    db.close();
    expect(rows.map((row) => row["order_id"])).toEqual(wanted);
  });

  test("on MySQL", async ({ skip }) => {
    const why = unavailable("mysql");
    skip(why !== undefined, why);
    const database = await createDatabase("mysql");
    try {
      const connection = await createConnection(database.url);
      await connection.query(table);
      await packed("mysql", { DATABASE_URL: database.url });
      const [rows] = await connection.query("SELECT order_id FROM packed ORDER BY order_id");
      await connection.end();
      expect((rows as { order_id: number }[]).map((row) => row.order_id)).toEqual(wanted);
    } finally {
      await database.drop();
    }
  });
});

test("a NestJS shop, in CommonJS: three instances", ({ skip }) =>
  onPostgres(skip, async (env, client) => {
    const folder = project("nestjs-shop", {});
    await run(folder, join(root, "node_modules/.bin/tsc"), ["-p", "."]);
    expect(readFileSync(join(folder, "dist/main.js"), "utf8")).toContain("require(");
    writeFileSync(join(folder, "migrate.mjs"), migrate);
    await node(folder, "migrate.mjs", env);
    writeFileSync(
      join(folder, "stock.mjs"),
      `import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { stock } from "holdfast/stock";
import { Pool } from "pg";
const pool = new Pool({ connectionString: process.env.DATABASE_URL });
await stock(holdfast(fromPg(pool))).apply([{ sku: "CAP", quantity: 20 }, { sku: "MUG", quantity: 100 }]);
await pool.end();
`,
    );
    await node(folder, "stock.mjs", env);
    // Each of 30 orders comes to every instance; there are caps for 20.
    writeFileSync(
      join(folder, "orders.js"),
      `const { start } = require("./dist/main.js");
(async () => {
  const app = await start(0);
  const { port } = app.getHttpServer().address();
  const order = (n) => fetch(\`http://127.0.0.1:\${port}/orders\`, {
    method: "POST", headers: { "content-type": "application/json" },
    body: JSON.stringify({ id: \`order-\${n}\`, lines: [{ sku: "CAP", pieces: 1 }, { sku: "MUG", pieces: 2 }] }),
  });
  const answers = await Promise.all(Array.from({ length: 30 }, (_, n) => order(n)));
  const other = answers.find(({ status }) => status !== 201 && status !== 409);
  if (other) throw new Error(await other.text());
  const ask = async (id, lines) => {
    const answer = await fetch(\`http://127.0.0.1:\${port}/orders\`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ id, lines }),
    });
    return [answer.status, (await answer.json()).code, answer.headers.get("content-type").split(";")[0]];
  };
  const asked = [
    await ask("one", [{ sku: "NOSUCH", pieces: 1 }]),
    await ask("two", [{ sku: "MUG", pieces: 1000 }]),
    await ask("order-0", [{ sku: "MUG", pieces: 7 }]),
    await ask("three", [{ sku: "MUG", pieces: -5 }]),
  ];
  const wanted = [
    [404, "HF_STOCK_UNKNOWN_SKU", "application/problem+json"],
    [409, "HF_STOCK_INSUFFICIENT", "application/problem+json"],
  ];
  if (JSON.stringify(asked.slice(0, 2)) !== JSON.stringify(wanted) || asked[3][0] !== 400) throw new Error(JSON.stringify(asked));
  if (answers[0].status === 201 && asked[2][0] !== 422) throw new Error(JSON.stringify(asked));
  const taken = await Promise.all(answers.filter(({ status }) => status === 201).map((answer) => answer.json()));
  console.log(taken.filter(({ replayed }) => !replayed).length);
  process.exit();
})();
`,
    );
    const said = await Promise.all([1, 2, 3].map(() => node(folder, "orders.js", env)));
    expect(sum(said)).toBe(20);
    const { rows } = await client.query(
      "SELECT sku, on_hand::int AS left FROM holdfast.stock_level ORDER BY sku",
    );
    expect(rows).toEqual([
      { sku: "CAP", left: 0 },
      { sku: "MUG", left: 60 },
    ]);
  }));

test("a nightly job: five instances, each tick once", ({ skip }) =>
  onPostgres(skip, async (env, client) => {
    const folder = project("nightly-job");
    await client.query("CREATE TABLE report (night timestamptz NOT NULL)");
    writeFileSync(join(folder, "migrate.ts"), migrate);
    await node(folder, "migrate.ts", env);
    // An instance that is up ends in order.
    writeFileSync(join(folder, "up.ts"), `await import("./main.ts");\nconsole.log("up");\n`);
    const instances: ChildProcess[] = [];
    try {
      for (let i = 0; i < 5; i++)
        instances.push(
          spawn(process.execPath, ["up.ts"], {
            cwd: folder,
            // Every second, in place of every night.
            env: { ...process.env, ...env, NODE_OPTIONS: "", REPORT_CRON: "* * * * * *" },
            stdio: ["ignore", "pipe", "inherit"],
          }),
        );
      await Promise.all(instances.map(({ stdout }) => once(stdout as NodeJS.ReadableStream, "data")));
      await eventually(async () => {
        const { rows } = await client.query<{ n: number }>("SELECT count(*)::int AS n FROM report");
        expect(rows[0]?.n).toBeGreaterThanOrEqual(3);
        return true;
      });
    } finally {
      for (const instance of instances) instance.kill("SIGTERM");
      await Promise.all(
        instances.map(async (instance) => {
          if (instance.exitCode === null && instance.signalCode === null) await once(instance, "exit");
        }),
      );
    }
    expect(instances.map(({ exitCode }) => exitCode)).toEqual([0, 0, 0, 0, 0]);
    const { rows } = await client.query("SELECT night FROM report GROUP BY night HAVING count(*) > 1");
    expect(rows).toEqual([]);
  }));

test("their code has the types that it seems to have", async () => {
  const esm = readdirSync(workshop).filter((name) => name in sizes && name !== "nestjs-shop");
  expect(esm.length).toBeGreaterThanOrEqual(1);
  writeFileSync(
    join(workshop, "tsconfig.json"),
    JSON.stringify({
      compilerOptions: {
        module: "nodenext",
        target: "es2024",
        strict: true,
        noEmit: true,
        skipLibCheck: true,
        types: ["node"],
        allowImportingTsExtensions: true,
      },
      include: esm.map((name) => `${name}/**/*.ts`),
    }),
  );
  await run(workshop, join(root, "node_modules/.bin/tsc"), ["-p", "."]);
});

test("every guide is run, and listed for people", () => {
  const pages = readdirSync(guides).filter((name) => name !== "README.md");
  const index = readFileSync(join(guides, "README.md"), "utf8");
  expect(pages.filter((page) => !index.includes(`](${page})`))).toEqual([]);
  const own = readFileSync(fileURLToPath(import.meta.url), "utf8");
  expect(pages.filter((page) => !own.includes(`project("${page.slice(0, -3)}"`))).toEqual([]);
});
