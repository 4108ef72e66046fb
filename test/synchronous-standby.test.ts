/**
 * A primary whose synchronous standby is away: what is committed is kept here, and the answer does not come. Who cancels the wait
 * is told "done" with a warning: "the transaction has already committed locally". What callers are told must be as true.
 */
import { type Holdfast, holdfast, key, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import type { ConformanceSite } from "holdfast/testing";
import { Client, Pool } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type EmbeddedPostgres, startPostgres } from "../packages/cli/src/embedded.ts";
import { backendNamed } from "./backends.ts";
import { eventually } from "./harness/wait.ts";

let server: EmbeddedPostgres;
/** Waits for nobody. */
let admin: Client;

beforeAll(async () => {
  server = await startPostgres({ settings: { fsync: "off" } });
  const pool = new Pool({ connectionString: server.url() });
  await holdfast(fromPg(pool)).migrate();
  await pool.end();
  admin = new Client({ connectionString: server.url() });
  await admin.connect();
  await admin.query("SET synchronous_commit = local");
  await admin.query(`CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, version int NOT NULL)`);
  await admin.query("CREATE TABLE probe ()");
});

afterAll(async () => {
  await admin?.end();
  await server?.stop();
});

const waiting = async (): Promise<number> =>
  (await admin.query("SELECT count(*)::int AS n FROM pg_stat_activity WHERE wait_event = 'SyncRep'")).rows[0]
    .n;

async function standbys(names: string): Promise<void> {
  await admin.query(`ALTER SYSTEM SET synchronous_standby_names = '${names}'`);
  await admin.query("SELECT pg_reload_conf()");
  await eventually(async () => {
    const { rows } = await admin.query("SHOW synchronous_standby_names");
    return rows[0].synchronous_standby_names === names;
  });
  if (names !== "") await eventually(commitsWait);
}

/** The checkpointer tells all sessions whether they wait, and reads the setting in its own time. */
async function commitsWait(): Promise<boolean> {
  const session = new Client({ connectionString: server.url() });
  await session.connect();
  try {
    const { rows } = await session.query("SELECT pg_backend_pid() AS id");
    let done = false;
    const committed = session.query("INSERT INTO probe DEFAULT VALUES").then(() => (done = true));
    await eventually(async () => done || (await waiting()) > 0);
    const waited = !done;
    await admin.query("SELECT pg_cancel_backend($1)", [rows[0].id]);
    await committed;
    return waited;
  } finally {
    await session.end();
  }
}

describe.for(["pg", "postgres.js", "Prisma", "Kysely"])("%s", (name) => {
  let site: ConformanceSite;
  let hf: Holdfast<unknown>;

  beforeEach(async () => {
    await admin.query("TRUNCATE account, holdfast.lease");
    await admin.query("INSERT INTO account VALUES (1, 0, 1)");
    site = await backendNamed(name).open(server.url());
    hf = holdfast(site.database);
    // What is asked for once is asked for now.
    await versioned(hf, "account").read(1);
    await quota(hf, { name, limit: 100, per: "day" }).consume("warm");
    await standbys("nobody");
  });

  afterEach(async () => {
    await standbys("");
    await hf.close();
    await site.close();
  });

  /** Aborts when the server waits for the standby. */
  async function abortedMeanwhile<T>(call: (signal: AbortSignal) => Promise<T>): Promise<unknown> {
    const controller = new AbortController();
    const told = call(controller.signal).then(
      (value) => ({ value }),
      (error: unknown) => ({ error }),
    );
    await eventually(async () => (await waiting()) > 0);
    controller.abort(new Error("not wanted any more"));
    return told;
  }

  /** Nobody waits any more: what was kept is there for everybody. */
  async function settled(): Promise<void> {
    await standbys("");
    await eventually(async () => (await waiting()) === 0);
  }

  test("a lease whose answer does not come: it is not said that nothing was kept", async () => {
    const told = await hf.lease(key("report", name), { wait: 300, ttl: 600_000 }).catch((e: unknown) => e);
    expect(told).toMatchObject({ code: "HF_OUTCOME_UNKNOWN", retryable: true });
    expect((told as Error).message).not.toMatch(/nothing was kept/i);
    expect((told as Error).message).toContain(`The lease report:${name}`);
    // It is given back once the server answers.
    await settled();
    await eventually(async () => (await hf.leases(key("report", name))).length === 0);
  });

  // Others cannot end a wait.
  if (name !== "pg" && name !== "postgres.js") return;

  test("what is aborted is rejected only if it was not kept", async () => {
    const told = await abortedMeanwhile((signal) =>
      versioned<{ balance: number }>(hf, "account").update(1, ({ balance }) => ({ balance: balance + 1 }), {
        signal,
      }),
    );
    expect(told).toMatchObject({ value: { balance: 1 } });
    const uses = quota(hf, { name, limit: 100, per: "day" });
    expect(await abortedMeanwhile((signal) => uses.consume("aborted", 1, { signal }))).toMatchObject({
      value: { used: 1 },
    });
    await settled();
    expect((await admin.query("SELECT balance FROM account")).rows).toEqual([{ balance: 1 }]);
    expect(await uses.peek("aborted")).toMatchObject({ used: 1 });
  });
});
