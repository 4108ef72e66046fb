/**
 * A queue in a table of your own, where `holdfast/queue` is too much or its tables are not wanted: rows are claimed, completed by
 * whoever has claimed them, and swept if their worker has died. The same on every database; only the table and its indexes
 * differ, and how the server tells the time.
 */
import { fork } from "node:child_process";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { type Holdfast, type Statement, type Transaction, sql } from "holdfast";
import { type Database, type Kind, kindOf, open } from "../database.ts";
import { command } from "../support.ts";

const table = "holdfast_example_job";

/** `claim` is another one each time the job is claimed: it tells a worker that was too slow that somebody else has the job. */
const columns = (id: string) => `id ${id}, payload varchar(200) NOT NULL,
  state varchar(10) NOT NULL DEFAULT 'ready', attempts int NOT NULL DEFAULT 0, claim varchar(36), until bigint`;

export const tables: Readonly<Record<Kind, string>> = {
  postgres: columns("bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
  mysql: columns("bigint AUTO_INCREMENT PRIMARY KEY"),
  sqlite: columns("integer PRIMARY KEY"),
};

/**
 * What is looked for is found by index, however many jobs have ended: of the ready ones the first, of the running ones those
 * that are over. PostgreSQL and SQLite have partial indexes. MySQL and MariaDB have none: the state comes first there.
 */
const partial = [
  `CREATE INDEX ${table}_ready ON ${table} (id) WHERE state = 'ready'`,
  `CREATE INDEX ${table}_until ON ${table} (until) WHERE state = 'running'`,
];
export const indexes: Readonly<Record<Kind, readonly string[]>> = {
  postgres: partial,
  sqlite: partial,
  mysql: [
    `CREATE INDEX ${table}_ready ON ${table} (state, id)`,
    `CREATE INDEX ${table}_until ON ${table} (state, until)`,
  ],
};

/** By the database's clock: those of its clients differ. After a wait, too. */
const clocks: Readonly<Record<Kind, Statement>> = {
  postgres: sql`(extract(epoch FROM clock_timestamp()) * 1000)::bigint`,
  mysql: sql`CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)`,
  sqlite: sql`CAST(unixepoch('subsec') * 1000 AS INTEGER)`,
};

export interface Claimed {
  readonly id: number;
  readonly payload: string;
  readonly claim: string;
}

type Queue = Pick<Database, "hf" | "kind">;

/** The first ones that nobody has, for so many milliseconds. What others are claiming at the moment is passed over. */
export function claim({ hf, kind }: Queue, limit: number, ttl: number): Promise<Claimed[]> {
  return hf.transaction(async (tx) => {
    // Written out, not bound: so it is seen to be the condition of the index.
    const free = sql`state = 'ready'`;
    const jobs = await tx.rows<{ id: number | string; payload: string }>(table, free, {
      orderBy: "id",
      limit,
      wait: "skip",
      columns: ["id", "payload"],
    });
    const by = randomUUID();
    for (const { id } of jobs)
      await tx.query(sql`UPDATE holdfast_example_job
        SET state = 'running', attempts = attempts + 1, claim = ${by}, until = ${clocks[kind]} + ${ttl} WHERE id = ${id}`);
    return jobs.map(({ id, payload }) => ({ id: Number(id), payload, claim: by }));
  });
}

/**
 * What the job does to this database is part of the transaction in which it ends: it happens once, however often the job was
 * claimed. False: somebody else has the job by now, and nothing was done.
 */
export function complete(
  hf: Holdfast<unknown>,
  job: Claimed,
  effect: (tx: Transaction<unknown>) => Promise<unknown>,
): Promise<boolean> {
  return hf.transaction(async (tx) => {
    const [found] = await tx.rows<{ claim: string }>(table, [job.id], { missing: "report" });
    if (found?.claim !== job.claim) return false;
    await effect(tx);
    await tx.query(sql`DELETE FROM holdfast_example_job WHERE id = ${job.id}`);
    return true;
  });
}

/** Jobs whose worker has died, or is too slow, are ready again; after so many attempts they are left for people to look at. */
export function sweep({ hf, kind }: Queue, attempts = 5): Promise<number> {
  return hf.transaction(async (tx) => {
    const over = sql`state = 'running' AND until < ${clocks[kind]}`;
    const jobs = await tx.rows<{ id: number | string; attempts: number }>(table, over, {
      orderBy: "until",
      limit: 100,
      wait: "skip",
    });
    for (const job of jobs) {
      const state = job.attempts < attempts ? "ready" : "failed";
      await tx.query(
        sql`UPDATE holdfast_example_job SET state = ${state}, claim = NULL, until = NULL WHERE id = ${job.id}`,
      );
    }
    return jobs.length;
  });
}

export interface Result {
  readonly jobs: number;
  readonly effects: number;
  /** Jobs of which there is more than one. */
  readonly twice: number;
  readonly left: number;
  readonly swept: boolean;
}

const jobs = 120;
const workers = 3;

/** Three processes. The first dies while it has jobs, before the others could do them all. */
export async function main(url: string): Promise<Result> {
  const file = fileURLToPath(new URL("./worker.ts", import.meta.url));
  await using database = await opened(url);
  const { query } = database;
  await database.hf.transaction(async (tx) => {
    for (let n = 0; n < jobs; n++)
      await tx.query(sql`INSERT INTO holdfast_example_job (payload) VALUES (${`job ${n}`})`);
  });
  const start = (...args: string[]) =>
    once(fork(file, args, { env: { ...process.env, DATABASE_URL: url } }), "exit");
  await start("doomed");
  const ended = Promise.all(Array.from({ length: workers - 1 }, () => start()));
  let [swept, over] = [0, false];
  void ended.then(() => (over = true));
  while (!over) {
    swept += await sweep(database);
    await sleep(100);
  }
  const [effects] = await query<{ n: number; different: number }>(
    sql`SELECT count(*) AS n, count(DISTINCT job) AS different FROM holdfast_example_effect`,
  );
  const [left] = await query<{ n: number }>(sql`SELECT count(*) AS n FROM holdfast_example_job`);
  return {
    jobs,
    effects: Number(effects?.n),
    twice: Number(effects?.n) - Number(effects?.different),
    left: Number(left?.n),
    swept: swept > 0,
  };
}

async function opened(url: string): Promise<Database> {
  const kind = kindOf(url);
  const database = await open(url, { [table]: tables[kind], holdfast_example_effect: "job int NOT NULL" });
  for (const index of indexes[kind]) await database.define(index);
  return database;
}

await command(
  import.meta.url,
  main,
  ({ jobs: n, effects, twice, left }) =>
    `${n} jobs, of which a worker that was killed had some: ${effects} effects, ${twice} of them twice, ${left} jobs left`,
);
