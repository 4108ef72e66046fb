/**
 * What a claim, an end and a look read after many jobs, where there are no functions of the server's: the plan of every statement that
 * is sent, as the server explains it while the tables are as they are. No clock.
 */
import { type Holdfast, type Statement, holdfast, sql } from "holdfast";
import { queue } from "holdfast/queue";
import { execute } from "holdfast/testing";
import { describe, expect, test } from "vitest";
import { missingFor, within } from "./harness/places.ts";
import { type Site, ourTable } from "./harness/sites.ts";
import { eventually } from "./harness/wait.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const done = long ? 200_000 : 5000;
/** Waiting meanwhile, of another queue and of this one: enough to tell an index from a whole table. */
const waiting = 2000;

/** Tables with a row for each job, or for each batch of them. */
const growing = ["ready", "grouped", "delayed", "failed", "key", "group", "lease", "mark"];

/** An object with one of its members changed; the others are its own. */
function changed<T extends object>(of: T, member: string, to: (own: unknown) => unknown): T {
  return new Proxy(of, {
    get(target, name) {
      const value: unknown = Reflect.get(target, name, target);
      const own: unknown = typeof value === "function" ? value.bind(target) : value;
      return name === member ? to(own) : own;
    },
  });
}

type Anything = (...args: readonly unknown[]) => unknown;

/** SQLite tells by itself what it is given, with the values written out. */
async function watchedFile(file: string, seen: Statement[]): Promise<Site["database"]> {
  const [{ default: Database }, { fromBetterSqlite3 }] = await Promise.all([
    import("better-sqlite3"),
    import("holdfast/better-sqlite3"),
  ]);
  return fromBetterSqlite3(() => {
    const db = new Database(file, { verbose: (text) => seen.push(sql.raw(String(text))) });
    db.pragma("journal_mode = WAL");
    return db;
  });
}

/** The same database, and all that is sent to it. */
function watched(database: Site["database"], seen: Statement[]): Site["database"] {
  const all = new WeakMap<object, object>();
  const watch = (connection: object): object => {
    const known = all.get(connection);
    if (known) return known;
    const proxy = changed(connection, "query", (query) => (statement: Statement, ...rest: unknown[]) => {
      seen.push(statement);
      return (query as Anything)(statement, ...rest);
    });
    all.set(connection, proxy);
    return proxy;
  };
  return changed(database, "connect", (connect) => async (...purpose: unknown[]) => {
    const pinned = (await (connect as Anything)(...purpose)) as object;
    return changed(pinned, "connection", (connection) => watch(connection as object));
  });
}

interface Plan {
  /** What was read, by its name or by what the statement calls it. */
  readonly tables: readonly string[];
  /** Of those, the ones that were read from end to end. */
  readonly whole: readonly string[];
}

/** One row for each queue, process, batch or completed job under way: they are few, and may be read whole. */
const few = ["holdfast_queue", "holdfast_queue_worker", "holdfast_queue_lease", "holdfast_queue_mark"];

function planOf(file: boolean, rows: readonly Readonly<Record<string, unknown>>[]): Plan {
  const read = rows.map((row) => {
    if (!file) return [String(row["table"]), ["ALL", "index"].includes(String(row["type"]))] as const;
    const [, how, table = ""] = /^(SCAN|SEARCH) (\w+)/.exec(String(row["detail"])) ?? [];
    return [how === undefined ? "" : table, how === "SCAN"] as const;
  });
  // What a statement brings along itself is no table.
  const tables = read.filter(
    ([table]) => /^\w+$/.test(table) && !["given", "CONSTANT", "null"].includes(table),
  );
  return {
    tables: tables.map(([table]) => table),
    whole: tables.flatMap(([table, all]) => (all && !few.includes(table) ? [table] : [])),
  };
}

/** Of those that read: what the server says. */
async function explained(backend: string, site: Site, statements: readonly Statement[]) {
  const file = backend.includes("sqlite");
  const tables = new Set<string>();
  const whole: string[] = [];
  for (const statement of statements) {
    const text = statement.parts.join("?").replaceAll(/\s+/g, " ").trim();
    if (!/^(SELECT|UPDATE|DELETE) /.test(text) || (!text.includes("FROM") && text.startsWith("SELECT")))
      continue;
    // Of an empty list: nothing is read.
    if (text.endsWith("WHERE 1 = 0")) continue;
    const rows = await execute(
      site,
      file ? sql`EXPLAIN QUERY PLAN ${statement}` : sql`EXPLAIN FORMAT = TRADITIONAL ${statement}`,
    );
    const plan = planOf(file, rows);
    for (const table of plan.tables) tables.add(table);
    if (plan.whole.length > 0) whole.push(`${text}: ${JSON.stringify(rows)}`);
  }
  return { tables: [...tables], whole };
}

/** Of all that the queues have on disk: room that is free in it counts, too. */
async function bytesOnDisk(backend: string, site: Site): Promise<number> {
  const spaces = backend.endsWith("MariaDB") ? "innodb_sys_tablespaces" : "innodb_tablespaces";
  const [row] = await execute(
    site,
    backend.includes("sqlite")
      ? sql`SELECT page_count * page_size AS bytes FROM pragma_page_count, pragma_page_size`
      : sql`SELECT sum(file_size) AS bytes FROM information_schema.${sql.id(spaces)}
          WHERE name LIKE concat(database(), '/holdfast_queue%')`,
  );
  return Number(row?.["bytes"]);
}

describe.each(["mysql2 on MySQL", "mysql2 on MariaDB", "better-sqlite3"])("%s", (backend) => {
  test(
    "after many jobs everything is found by an index, and nothing is left of them",
    { timeout: 900_000 },
    async ({ skip }) => {
      const why = missingFor(backend);
      skip(why !== undefined, why);
      await within(backend, async (url, site) => {
        const seen: Statement[] = [];
        const hf: Holdfast<unknown> = holdfast(
          backend === "better-sqlite3" ? await watchedFile(url, seen) : watched(site.database, seen),
        );
        const jobs = queue<number>(hf, "jobs");
        const work = async (count: number, transactional: boolean) => {
          let worked = 0;
          const options = { concurrency: 50, pollMs: 20, ttlMs: 60_000 };
          const worker = transactional
            ? jobs.work(async () => void worked++, { ...options, transactional: true })
            : jobs.work(async () => void worked++, options);
          await eventually(() => worked >= count, { timeout: 60_000 + 10 * count, interval: 20 });
          await worker.stop();
        };
        // Jobs without anything, of groups, with keys, and late ones.
        const some = (count: number) =>
          Array.from({ length: count }, (__, n) => ({
            payload: n,
            ...(n % 4 === 1 && { group: `group ${n % 40}` }),
            ...(n % 4 === 2 && { key: `key ${n}` }),
            ...(n % 8 === 3 && { delayMs: 1 }),
          }));
        const sizes: number[] = [];
        for (let left = done; left > 0; left -= 5000) {
          await jobs.enqueueMany(some(Math.min(left, 5000)));
          await work(Math.min(left, 5000), left % 10_000 === 0);
          sizes.push(await bytesOnDisk(backend, site));
          seen.length = 0;
        }
        if (long) {
          console.log(`${backend}: ${done} jobs, MB:`, ...sizes.map((size) => (size / 1e6).toFixed(1)));
          // Jobs that were kept would have made it four times as large.
          expect(sizes.at(-1)).toBeLessThan(2 * (sizes[sizes.length / 4] as number));
        }
        const rows = async () => {
          const counted: Record<string, number> = {};
          for (const name of growing) {
            const [row] = await execute(
              site,
              sql`SELECT count(*) AS n FROM ${ourTable(backend, `queue_${name}`)}`,
            );
            if (Number(row?.["n"]) > 0) counted[name] = Number(row?.["n"]);
          }
          return counted;
        };
        // Groups that are empty are forgotten by whoever looks for jobs next.
        expect(Object.keys(await rows()).filter((name) => name !== "group")).toEqual([]);

        const others = queue<number>(hf, "others");
        const later = { delayMs: 3_600_000 };
        for (const each of [jobs, others]) {
          await each.enqueueMany(some(waiting));
          await each.enqueueMany(Array.from({ length: waiting }, (__, n) => ({ payload: n, ...later })));
        }
        const read = new Set<string>();
        for (const transactional of [false, true]) {
          // The one before may have left nothing: it goes on until it is told to stop.
          await jobs.enqueueMany(some(waiting));
          seen.length = 0;
          await work(400, transactional);
          const { tables, whole } = await explained(backend, site, seen);
          expect(whole).toEqual([]);
          for (const table of tables) read.add(table);
        }
        // It happened, or it was not shown.
        for (const table of ["ready", "grouped"]) expect([...read]).toContain(`holdfast_queue_${table}`);
        // A question that no index answers is found out, or the above would prove nothing.
        const without = sql`SELECT id FROM ${ourTable(backend, "queue_ready")} WHERE attempt = ${7}`;
        expect((await explained(backend, site, [without])).whole).toHaveLength(1);
        await hf.close();
      });
    },
  );
});
