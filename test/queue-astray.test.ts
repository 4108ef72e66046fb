/** A worker that looks for jobs whose claim was not answered, and is itself given up for dead before it can. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { setTimeout as sleep } from "node:timers/promises";
import { sql } from "holdfast";
import { type Job, queue } from "holdfast/queue";
import { execute } from "holdfast/testing";
import mysql, { type RowDataPacket } from "mysql2/promise";
import { Client } from "pg";
import { beforeEach, describe, expect, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";
import { openNamed, ourTable } from "./harness/sites.ts";
import { eventually } from "./harness/wait.ts";

const backends = [
  { backend: "pg", server: "postgres" },
  { backend: "mysql2 on MariaDB", server: "mariadb" },
  { backend: "mysql2 on MySQL", server: "mysql" },
] as const;

/** More than the pool has, and those that take the places of connections that die. */
const callers = 14;

/** Call what it returns to lose the answer to the next claim that brings jobs, after it was committed; `lost` is called before. */
function claimsOn(proxy: Proxy): (lost: () => void) => void {
  /** On PostgreSQL a claim is one statement, which has a name from its second time on. */
  const names = new Set<string>();
  let inserted = false;
  let armed: (() => void) | undefined;
  proxy.cutWhen((direction, chunk) => {
    if (direction !== "to-server") return "pass";
    const text = chunk.toString("latin1");
    const name = /(holdfast_[0-9a-f]{12})\0[^\0]*queue_claim_jobs/.exec(text)?.[1];
    if (name !== undefined) names.add(name);
    if (!armed) return "pass";
    inserted ||= text.includes("INTO holdfast_queue_lease");
    const ends =
      text.includes("queue_claim_jobs") ||
      [...names].some((each) => text.includes(each)) ||
      (inserted && text.includes("@holdfast_committed = 1"));
    if (!ends) return "pass";
    proxy.cutWhen(undefined);
    armed();
    return "drop-answer";
  });
  return (lost) => void (armed = lost);
}

/** Ends the session that has the workers' lock. Others do not find the lock free until `release`: what they do about it is not tested here. */
interface Takeover {
  takeOver(): Promise<void>;
  release(): Promise<void>;
}

async function takeoverOn(url: string): Promise<Takeover> {
  if (url.startsWith("mysql")) {
    const [admin, waiting] = [await mysql.createConnection(url), await mysql.createConnection(url)];
    const one = async (text: string, values: unknown[] = []) =>
      (await admin.query<RowDataPacket[]>(text, values))[0][0];
    return {
      async takeOver() {
        const lock = "SELECT CONCAT('holdfast:session:', `lock`) AS name FROM holdfast_queue_worker";
        const name = String((await one(lock))?.["name"]);
        const holder = (await one("SELECT IS_USED_LOCK(?) AS id", [name]))?.["id"] as number;
        const taking = waiting.query("SELECT GET_LOCK(?, 60)", [name]);
        await eventually(() => one("SELECT 1 FROM information_schema.processlist WHERE state = 'User lock'"));
        await admin.query(`KILL ${holder}`);
        await taking;
      },
      async release() {
        await waiting.end();
        await admin.end();
      },
    };
  }
  const [admin, waiting] = [new Client({ connectionString: url }), new Client({ connectionString: url })];
  await Promise.all([admin.connect(), waiting.connect()]);
  const ours = `FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND d.datname = current_database()`;
  return {
    async takeOver() {
      const { rows } = await admin.query(
        `SELECT l.pid, ((l.classid::bigint << 32) | l.objid::bigint)::text AS key ${ours} AND l.granted`,
      );
      const taking = waiting.query("SELECT pg_advisory_lock($1)", [rows[0].key]);
      await eventually(async () => (await admin.query(`SELECT 1 ${ours} AND NOT l.granted`)).rows.length > 0);
      await admin.query("SELECT pg_terminate_backend($1)", [rows[0].pid]);
      await taking;
    },
    async release() {
      await waiting.end();
      await admin.end();
    },
  };
}

describe.each(backends)("$backend", ({ backend, server }) => {
  const why = unavailable(server);
  beforeEach(({ skip }) => skip(why !== undefined, why));

  test("runs each job once", { timeout: 120_000 }, async () => {
    await using cleanup = new AsyncDisposableStack();
    const database = await createDatabase(server);
    cleanup.defer(() => database.drop());
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    cleanup.defer(() => proxy.close());
    const loseClaim = claimsOn(proxy);
    const outside = await openNamed(backend, database.url);
    cleanup.defer(() => outside.close());
    const { hf, close } = await openNamed(backend, proxy.url(database.url));
    cleanup.defer(close);
    await outside.hf.migrate();
    await execute(outside, sql`CREATE TABLE effect (name varchar(20) NOT NULL)`);
    const effects = async () =>
      (await execute(outside, sql`SELECT name FROM effect ORDER BY name`)).map((row) => String(row["name"]));

    const jobs = queue<string>(outside.hf, "astray");
    const [completed, claimed] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const [lost, end] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const onLost = () => lost.resolve();
    subscribe("holdfast:queue:lost", onLost);
    cleanup.defer(() => void unsubscribe("holdfast:queue:lost", onLost));
    const worker = queue<string>(hf, "astray").work(
      async (job: Job<string>) => {
        await hf.transaction(async (tx) => {
          await tx.query(sql`INSERT INTO effect (name) VALUES (${job.payload})`);
          await job.complete(tx);
        });
        if (job.payload !== "first") return;
        // Committed, and the worker has not said so yet.
        completed.resolve();
        await end.promise;
      },
      // Sessions and claims are lost on purpose.
      { concurrency: 2, pollMs: 50, onTrouble: () => {} },
    );
    cleanup.defer(() => worker.stop({ patienceMs: 0 }));
    cleanup.defer(end.resolve);

    await jobs.enqueue("first");
    await completed.promise;
    const locked = sql`SELECT 1 AS one FROM ${ourTable(backend, "queue_worker")} WHERE ${sql.id("lock")} IS NOT NULL`;
    await eventually(async () => (await execute(outside, locked)).length === 1);
    const session = await takeoverOn(database.url);
    let released: Promise<void> | undefined;
    const release = () => (released ??= session.release());
    cleanup.defer(release);
    // From the moment of the claim on, others have all connections: the worker waits for one to look for what it was given.
    const busy: Promise<unknown>[] = [];
    loseClaim(() => {
      for (let i = 0; i < callers; i++) busy.push(hf.transaction(() => end.promise));
      claimed.resolve();
    });
    await jobs.enqueue("second");
    await claimed.promise;
    await sleep(500);
    await session.takeOver();
    await lost.promise;
    end.resolve();
    await Promise.allSettled(busy);
    // It goes on with others after it has looked.
    await jobs.enqueue("third");
    await eventually(async () => (await effects()).includes("third"));
    await release();
    await eventually(async () => {
      const { waiting, delayed, running } = await jobs.counts();
      return waiting + delayed + running === 0;
    });
    expect(await effects()).toEqual(["first", "second", "third"]);
  });
});
