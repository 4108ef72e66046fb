/**
 * `npm run test:quick`: what is worth knowing within three minutes. Tests that were changed come first; then units, the
 * architecture, and the conformance of one client of each engine, and of the clients that were changed. `npm test` runs everything.
 */
import { spawn, spawnSync } from "node:child_process";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../", import.meta.url));
const ENV = { ...process.env, PATH: `${join(ROOT, "node_modules", ".bin")}:${process.env["PATH"] ?? ""}` };

/** One client of each engine, by its name in `test/backends.ts`, and the server that it needs. */
const usual: Readonly<Record<string, string | undefined>> = {
  pg: "postgres",
  "mysql2 on MariaDB": "mariadb",
  "better-sqlite3": undefined,
  libsql: undefined,
  duckdb: undefined,
};

/** By the folder of a client: which backends it is. */
const byClient: Readonly<Record<string, string>> = {
  postgres: "postgres.js",
  pglite: "PGlite",
  prisma: "Prisma",
  drizzle: "Drizzle",
  kysely: "Kysely",
  knex: "Knex",
  typeorm: "TypeORM",
  "mikro-orm": "MikroORM",
  sequelize: "Sequelize",
  mariadb: "mariadb on MariaDB",
  "node-sqlite": "node:sqlite",
};

function changedFiles(): string[] {
  const git = (...args: string[]) =>
    spawnSync("git", args, { cwd: ROOT, encoding: "utf8" }).stdout.split("\n").filter(Boolean);
  const now = [...git("diff", "--name-only", "HEAD"), ...git("ls-files", "--others", "--exclude-standard")];
  // All is committed: what the last commit was about.
  return now.length > 0 ? now : git("diff", "--name-only", "HEAD~1");
}

const changed = changedFiles();
const clients = new Set(
  changed.flatMap((file) => /^packages\/holdfast\/src\/clients\/([^/]+)\//.exec(file)?.[1] ?? []),
);
const backends = [...[...clients].flatMap((client) => byClient[client] ?? []), ...Object.keys(usual)];
// Long campaigns are for `npm test`.
const long =
  /\/(conformance\/\w+|exact|chaos|lost-update|leases|transfers|faults|once|traps-duckdb|pools|busy-loop)\.test\.ts$/;
const tests = changed.filter((file) => /^test\/.*\.test\.ts$/.test(file) && !long.test(file));
console.log(
  `Conformance of ${backends.join(", ")}.${tests.length > 0 ? ` First: ${tests.join(", ")}.` : ""}`,
);

const started = performance.now();
const first = tests.length > 0 ? await vitest(tests, {}) : 0;
const rest = await vitest(["test/architecture.test.ts", "test/unit", "test/conformance"], {
  HOLDFAST_BACKENDS: backends.join(),
});
console.log(`${Math.round((performance.now() - started) / 1000)} s`);
process.exitCode = first || rest;

function vitest(files: readonly string[], env: Record<string, string>): Promise<number> {
  const servers = [...new Set(Object.values(usual).filter((server) => server !== undefined))].join();
  const child = spawn("vitest", ["run", "--reporter=dot", ...files], {
    cwd: ROOT,
    env: { ...ENV, HOLDFAST_SERVERS: process.env["HOLDFAST_SERVERS"] ?? servers, ...env },
    stdio: "inherit",
  });
  return new Promise((resolve, reject) => {
    child.once("error", reject);
    child.once("close", (code) => resolve(code ?? 1));
  });
}
