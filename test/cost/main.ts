/** `npm run cost`: what each call costs now, beside the committed table. */
import { randomBytes } from "node:crypto";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { startPostgres } from "@holdfast/cli";
import mysql from "mysql2/promise";
import { table as textTable } from "../../packages/cli/src/terminal.ts";
import { startMariadb } from "../harness/mariadb.ts";
import { startMysql } from "../harness/mysql.ts";
import { type Measured, compare, costNames, costs, toleranceOf, updated } from "./cost.ts";
import { clients, measure, serverOf } from "./measuring.ts";
import { readTable, writeTable } from "./table.ts";

/** Resolves to the address of the new database. */
type CreateDatabase = (name: string) => Promise<string>;

const usage = `npm run cost -- [--update] [client …]

Counts what each public call costs (round trips, messages, statements, bytes, promises, timers, abort controllers,
allocated bytes) and prints it. A figure beyond its tolerance is shown as committed→measured, and a rise is a failure.

  --update   writes the figures that changed into test/cost/table.md
  --help     shows this

Clients: ${clients.join(", ")}. All of them by default.`;

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    update: { type: "boolean", default: false },
    help: { type: "boolean", default: false },
  },
});

const unknown = positionals.filter((name) => !(clients as readonly string[]).includes(name));
if (values.help || unknown.length > 0) {
  if (unknown.length > 0) console.error(`There is no client ${unknown.join(", ")}.\n`);
  console.log(usage);
  process.exitCode = unknown.length > 0 ? 1 : 0;
} else {
  await run(positionals.length > 0 ? positionals : clients);
}

async function run(chosen: readonly string[]): Promise<void> {
  await using servers = new AsyncDisposableStack();
  const started = new Map<string, Promise<CreateDatabase>>();
  const committed = await readTable().catch((error: unknown) => {
    if ((error as { code?: unknown }).code === "ENOENT") return new Map<string, Measured>();
    throw error;
  });
  const next = new Map(committed);
  const rises: string[] = [];
  const drops: string[] = [];
  for (const client of chosen) {
    const server = serverOf(client);
    if (!started.has(server)) started.set(server, startServer(server, servers));
    let create: CreateDatabase;
    try {
      create = await (started.get(server) as Promise<CreateDatabase>);
    } catch (error) {
      console.log(`\n${client}: ${server} is not available: ${String(error)}`);
      continue;
    }
    // As long as the names of the tests' databases: names of locks may contain it.
    const measured = await measure(client, await create(`test_${randomBytes(8).toString("hex")}`));
    print(client, committed.get(client), measured);
    const compared = compare(client, committed.get(client), measured);
    rises.push(...compared.rises);
    drops.push(...compared.drops);
    next.set(client, updated(committed.get(client), measured));
  }
  for (const line of [...rises, ...drops]) console.log(line);
  if (values.update) {
    const known = clients.flatMap((name) => {
      const rows = next.get(name);
      return rows ? [[name, rows] as const] : [];
    });
    await writeTable(new Map(known));
    console.log("Wrote test/cost/table.md.");
  } else if (rises.length + drops.length > 0) {
    console.log("If that is meant: npm run cost -- --update");
    if (rises.length > 0) process.exitCode = 1;
  }
}

function print(client: string, committed: Measured | undefined, measured: Measured): void {
  const names = costNames.filter((name) => [...measured.values()].some((cost) => cost[name] !== 0));
  const rows = [...measured].map(([call, cost]) => [
    call,
    ...names.map((name) => {
      const was = committed?.get(call)?.[name];
      const is = cost[name];
      return was === undefined || Math.abs(is - was) <= toleranceOf(name, was) ? `${is}` : `${was}→${is}`;
    }),
  ]);
  console.log(`\n${client}`);
  console.log(textTable(["call", ...names.map((name) => costs[name].title)], rows));
}

async function startServer(server: string, stack: AsyncDisposableStack): Promise<CreateDatabase> {
  if (server === "file") {
    return async () => {
      const folder = await mkdtemp(join(tmpdir(), "holdfast-cost-"));
      stack.defer(() => rm(folder, { recursive: true, force: true }));
      return join(folder, "cost.db");
    };
  }
  if (server === "postgres") {
    const started = await startPostgres({ settings: { fsync: "off" } });
    stack.defer(() => started.stop());
    return async (name) => {
      await started.createDatabase(name);
      return started.url(name);
    };
  }
  const started = await (server === "mariadb" ? startMariadb() : startMysql());
  stack.defer(() => started.stop());
  return async (name) => {
    const connection = await mysql.createConnection(started.url);
    try {
      await connection.query(`CREATE DATABASE ${name}`);
      stack.defer(() => dropDatabase(started.url, name));
    } finally {
      await connection.end();
    }
    const url = new URL(started.url);
    url.pathname = `/${name}`;
    return url.href;
  };
}

/** The server may be one that stays. */
async function dropDatabase(url: string, name: string): Promise<void> {
  const connection = await mysql.createConnection(url);
  try {
    await connection.query(`DROP DATABASE ${name}`);
  } finally {
    await connection.end();
  }
}
