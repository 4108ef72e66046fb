/** A process that measures one client: its name and the address of an empty database are its arguments. */
// First: what is imported after it finds what it has replaced.
import { countsOf, passTime, quiet, readMethods, readSockets, watchPromises } from "./meters.ts";
import type Sqlite from "better-sqlite3";
import { UnsupportedError, holdfast } from "holdfast";
import type { DatabaseSync } from "node:sqlite";
import type { Connection } from "mysql2/promise";
import type { PoolClient } from "pg";
import type { TransactionSql } from "postgres";
import { backendNamed } from "../backends.ts";
import { type Call, type Ground, type Started, calls, createTables } from "./calls.ts";
import { type Cost, type Counts, countNames } from "./cost.ts";

/** Until connections are open, statements prepared and functions compiled. */
const warmUps = 12;
/** Of counts. An odd number, for the median. */
const samples = 15;
/** Of bytes, which are measured over several calls. */
const rounds = 5;
const callsPerRound = 6;

// The test has gone.
process.once("disconnect", () => process.exit());

const [client = "", url = ""] = process.argv.slice(2);
await readClient();
await prepareDatabase();
const bytes = await measured(bytesAllocated);
watchPromises();
const counts = await measured(medianCounts);
const result = [...counts].map(([call, each]): [string, Cost] => [
  call,
  { ...each, bytesAllocated: bytes.get(call) ?? Number.NaN },
]);
process.send?.(result, () => process.exit());

async function prepareDatabase(): Promise<void> {
  const site = await backendNamed(client).open(url);
  await holdfast(site.database).migrate();
  await createTables(site);
  await site.close();
}

async function readClient(): Promise<void> {
  if (client === "better-sqlite3") {
    const { default: Database } = await import("better-sqlite3");
    const statement = Object.getPrototypeOf(new Database(":memory:").prepare("SELECT 1")) as object;
    readMethods(Database.prototype, { run: ["exec"], prepare: ["prepare", "pragma"] });
    readMethods(statement, { run: ["run", "get", "all", "iterate"] });
  } else if (client === "node:sqlite") {
    const { DatabaseSync, StatementSync } = await import("node:sqlite");
    readMethods(DatabaseSync.prototype, { run: ["exec"], prepare: ["prepare"] });
    readMethods(StatementSync.prototype, { run: ["run", "get", "all", "iterate"] });
  } else {
    readSockets(client.startsWith("mysql2") ? "mysql" : "postgres");
  }
}

/** A statement as an application sends it through this client. */
function insertBy(name: string): Ground["insert"] {
  const values = ["ada", 1];
  const plain = "INSERT INTO upload (user_id, bytes) VALUES (?, ?)";
  if (name === "pg")
    return (native) =>
      (native as PoolClient).query("INSERT INTO upload (user_id, bytes) VALUES ($1, $2)", values);
  if (name === "postgres.js")
    return async (native) =>
      (native as TransactionSql)`INSERT INTO upload (user_id, bytes) VALUES (${"ada"}, ${1})`;
  if (name.startsWith("mysql2")) return (native) => (native as Connection).query(plain, values);
  return async (native) => (native as Sqlite.Database | DatabaseSync).prepare(plain).run("ada", 1);
}

/** By the name of each call that this client has. The instance is new: it does not listen for what was measured before. */
async function measured<T>(measure: (started: Started) => Promise<T>): Promise<Map<string, T>> {
  const site = await backendNamed(client).open(url);
  const hf = holdfast(site.database);
  const found = new Map<string, T>();
  for (const call of calls) {
    const started = await begun(call, { hf, site, insert: insertBy(client) });
    if (!started) continue;
    for (let i = 0; i < warmUps; i++) await started.run();
    found.set(call.name, await measure(started));
    await started.stop?.();
  }
  await hf.close();
  await site.close();
  return found;
}

/** Undefined: this client has no such call. */
async function begun(call: Call, ground: Ground): Promise<Started | undefined> {
  try {
    const started = await call.start(ground);
    await started.run();
    return started;
  } catch (error) {
    if (error instanceof UnsupportedError) return undefined;
    throw new Error(`${call.name} failed`, { cause: error });
  }
}

async function medianCounts({ run, goesOn = false }: Started): Promise<Counts> {
  const all: Counts[] = [];
  for (let i = 0; i < samples; i++) all.push(await countsOf(run, goesOn));
  const medians = countNames.map((name) => [name, median(all.map((each) => each[name]))] as const);
  return Object.fromEntries(medians) as Counts;
}

/** Bytes on the heap of JavaScript, for one call, in hundreds. */
async function bytesAllocated({ run, goesOn }: Started): Promise<number> {
  if (!globalThis.gc) throw new Error("The process needs --expose-gc");
  const found: number[] = [];
  // There is room for all rounds now. If something is collected all the same, the median leaves that round out.
  globalThis.gc();
  for (let round = 0; round < rounds; round++) {
    const before = process.memoryUsage().heapUsed;
    for (let i = 0; i < callsPerRound; i++) {
      passTime();
      await run();
      if (goesOn) await quiet();
    }
    found.push((process.memoryUsage().heapUsed - before) / callsPerRound);
  }
  return Math.round(median(found) / 100) * 100;
}

function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1] as number;
}
