/**
 * What a claim, an end, a sweep, a look and a count cost, by the server's own account of it: the plans of every statement inside of
 * the functions, and the blocks that they touched. No clock.
 */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

interface Node {
  readonly "Node Type": string;
  readonly "Relation Name"?: string;
  readonly "Rows Removed by Filter"?: number;
  readonly "Shared Hit Blocks"?: number;
  readonly "Shared Read Blocks"?: number;
  readonly Plans?: readonly Node[];
}

interface Explained {
  readonly "Query Text": string;
  readonly Plan: Node;
  readonly JIT?: object;
}

function* nodes(plan: Node): Generator<Node> {
  yield plan;
  for (const child of plan.Plans ?? []) yield* nodes(child);
}

const delayed = 1_000_000;
const dead = 300_000;
/** Of a claim of ten jobs, with their rows and index entries. What grows with the tables has thousands. */
const few = 800;

describe.each(
  (["postgres", "postgresOld"] as const).flatMap((server) => [
    { server, statistics: "of before" as const },
    // With what was deleted still there, the tables are long, and pass for empty.
    { server, statistics: "of a vacuum" as const },
  ]),
)("on $server, statistics $statistics", ({ server, statistics }) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolClient>;
  let reader: Client;
  let watched: Client;
  let plans: Explained[] = [];
  let numbers: Record<"full" | "fresh", number>;
  /** The last id that is gone. */
  let gone: number;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url });
    hf = holdfast(fromPg(pool));
    await hf.migrate();
    watched = new Client({ connectionString: database.url });
    await watched.connect();
    watched.on("notice", ({ message = "" }) => {
      const json = message.indexOf("{");
      if (json >= 0) plans.push(JSON.parse(message.slice(json)) as Explained);
    });
    // What a server that compiles does first with plans that it takes for expensive.
    await watched.query(`LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;
      SET auto_explain.log_analyze = on; SET auto_explain.log_timing = off; SET auto_explain.log_buffers = on;
      SET auto_explain.log_format = json; SET auto_explain.log_level = notice; SET client_min_messages = notice`);
    numbers = {
      full: Number(await one("SELECT holdfast.queue_open('full', NULL) AS value")),
      fresh: Number(await one("SELECT holdfast.queue_open('fresh', NULL) AS value")),
    };
    reader = new Client({ connectionString: database.url });
    await reader.connect();
    const { full } = numbers;
    const row = "0, 0, nextval('holdfast.queue_job_id'), clock_timestamp()";
    await pool.query(
      `INSERT INTO holdfast.queue_delayed (queue, priority, attempt, id, at, run_at, payload)
        SELECT ${full}, ${row}, clock_timestamp() + interval '1 day' + n * interval '1 ms', '1' FROM generate_series(1, ${delayed}) n`,
    );
    await reader.query("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM holdfast.queue");
    await pool.query(
      `INSERT INTO holdfast.queue_ready (queue, priority, attempt, id, at, payload) SELECT ${full}, ${row}, '1' FROM generate_series(1, ${dead})`,
    );
    await pool.query(`DELETE FROM holdfast.queue_ready`);
    await pool.query(
      `INSERT INTO holdfast.queue_delayed (queue, priority, attempt, id, at, run_at, payload)
        SELECT ${full}, ${row}, clock_timestamp() - interval '1 hour', '1' FROM generate_series(1, ${dead / 3})`,
    );
    await pool.query(`DELETE FROM holdfast.queue_delayed WHERE run_at < clock_timestamp()`);
    for (const [table, columns, values] of [
      [
        "queue_grouped",
        "queue, priority, attempt, id, at, grp, payload",
        `${full}, 0, 0, n, now(), 'a' || n, '1'`,
      ],
      // Of another queue: groups in turn means over those that are gone, too, while the snapshot is open.
      ["queue_group", "queue, grp", `${full + 10}, 'a' || n`],
      ["queue_key", "queue, key, job", `${full}, 'a' || n, n`],
      ["queue_lease", "worker, queue, counted, size, jobs", `0, ${full}, false, 1, '[]'`],
      ["queue_mark", "lease, place", "n, 0"],
      [
        "queue_failed",
        "queue, id, priority, attempt, at, failed_at, payload, error",
        `${full}, n, 0, 0, now(), now(), '1', ''`,
      ],
    ] as const) {
      await pool.query(
        `INSERT INTO holdfast.${table} (${columns}) SELECT ${values} FROM generate_series(1, ${dead / 3}) n`,
      );
      await pool.query(`DELETE FROM holdfast.${table}`);
    }
    // The autovacuum would do it at a time of its own.
    if (statistics === "of a vacuum") await pool.query("VACUUM (ANALYZE)");
    gone = Number(await one("SELECT last_value AS value FROM holdfast.queue_job_id"));
  }, 180_000);

  afterAll(async () => {
    await reader?.end();
    await watched?.end();
    await hf?.close();
    await pool?.end();
    await database?.drop();
  });

  beforeEach(({ skip }) => skip(why !== undefined, why));

  async function one(text: string): Promise<unknown> {
    const { rows } = await pool.query<{ value: unknown }>(text);
    return rows[0]?.value;
  }

  /** The statement's result, and what the server says of it and of all statements inside of it. */
  async function explained(text: string): Promise<{ row: Record<string, unknown>; blocks: number }> {
    plans = [];
    const { rows } = await watched.query<Record<string, unknown>>(text);
    expect(plans.length, "statements that were explained").toBeGreaterThan(0);
    for (const { "Query Text": query, Plan, JIT } of plans) {
      expect(JIT, `${query}: compiled`).toBeUndefined();
      for (const node of nodes(Plan)) {
        const { "Node Type": type, "Relation Name": table = "" } = node;
        if (!table.startsWith("queue") || type === "ModifyTable" || type === "LockRows") continue;
        expect(type, `${query}: ${table}`).toMatch(/^(Index Scan|Index Only Scan|Tid Scan)$/);
        expect(node["Rows Removed by Filter"] ?? 0, `${query}: rows of ${table} in vain`).toBeLessThan(few);
      }
    }
    const outer = plans.at(-1)?.Plan;
    return {
      row: rows[0] ?? {},
      blocks: (outer?.["Shared Hit Blocks"] ?? 0) + (outer?.["Shared Read Blocks"] ?? 0),
    };
  }

  const enlist = async (queue: number) =>
    Number(
      await one(
        `INSERT INTO holdfast.queue_worker (queue, beat, ttl) VALUES (${queue}, clock_timestamp(), 600000) RETURNING id AS value`,
      ),
    );

  const add = (queue: number, groups: string) =>
    pool.query(
      `SELECT holdfast.queue_add(${queue}, array_fill('1'::text, ARRAY[10]), NULL, NULL, ${groups}, NULL, NULL, true, NULL)`,
    );

  describe.each([false, true])("jit %s", (jit) => {
    beforeAll(async () => {
      if (why === undefined)
        await watched.query(`SET jit = ${jit ? "on" : "off"}; SET jit_above_cost = 1000`);
    });

    test.each(["full", "fresh"] as const)("claim and finish, of the %s queue", async (of) => {
      const queue = numbers[of];
      const worker = await enlist(queue);
      const where =
        of === "full"
          ? `'{0}', '{${gone}}', extract(epoch FROM clock_timestamp()) * 1000 - 5000`
          : "'{}', '{}', NULL";
      const claim = (whole = false) =>
        `SELECT * FROM holdfast.queue_claim_jobs(${queue}, ${worker}, 10, ${where}, ${whole}, NULL)`;
      // Once for what the session looks up in the catalogs, and keeps.
      await watched.query(claim());
      for (const groups of ["NULL", "ARRAY(SELECT 'g' || n FROM generate_series(1, 10) n)"]) {
        await add(queue, groups);
        const claimed = await explained(claim());
        expect(claimed.row["lease"]).not.toBeNull();
        expect(claimed.blocks, "blocks of a claim").toBeLessThan(few);
        const lease = Number(claimed.row["lease"]);
        const finished = await explained(
          `SELECT holdfast.queue_finish(${queue}, ${worker}, NULL, ARRAY[${lease}], '{0}', ARRAY[${lease}], '{1}', '{60000}', '{no}',
            ARRAY[${lease}], '{k}', '{1}', ARRAY[${lease}], '{0}', '{g1}')`,
        );
        expect(finished.blocks, "blocks of an end").toBeLessThan(few);
        await explained(
          `SELECT holdfast.queue_finish(${queue}, ${worker}, ARRAY[${lease}], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)`,
        );
      }
      const empty = await explained(claim());
      expect(empty.row["lease"]).toBeNull();
      expect(empty.blocks, "blocks of a claim that found nothing").toBeLessThan(few);
      // Everywhere: by the index too, over whatever lies in its way.
      await explained(claim(true));
    });

    test.each(["full", "fresh"] as const)("what is taken for a transaction, of the %s queue", async (of) => {
      const queue = numbers[of];
      const where = of === "full" ? `'{0}', '{${gone}}'` : "'{}', '{}'";
      for (const groups of ["NULL", "ARRAY(SELECT 'h' || n FROM generate_series(1, 10) n)"]) {
        await add(queue, groups);
        await watched.query("BEGIN");
        const taken = await explained(
          `SELECT * FROM holdfast.queue_take_jobs(${queue}, 10, ${where}, false, NULL)`,
        );
        const jobs = JSON.parse(String(taken.row["jobs"])) as [
          number,
          number,
          number,
          number,
          null,
          string | null,
        ][];
        expect(jobs.length).toBe(10);
        expect(taken.blocks).toBeLessThan(few);
        const settled = await explained(
          `SELECT holdfast.queue_settle(${queue}, '{${jobs.map(([id]) => id).join()}}', array_fill(0::smallint, ARRAY[10]),
            '{${jobs.map(([, , , , , group]) => group ?? "NULL").join()}}', NULL, NULL, NULL)`,
        );
        expect(settled.blocks).toBeLessThan(few);
        await watched.query("COMMIT");
      }
      const tended = await explained(
        `SELECT * FROM holdfast.queue_tend(${queue}, extract(epoch FROM clock_timestamp()) * 1000 - 5000, false)`,
      );
      expect(tended.blocks).toBeLessThan(few);
    });

    test("a sweep, with nobody dead and with somebody", async () => {
      const { full } = numbers;
      const idle = await explained("SELECT * FROM holdfast.queue_sweep(false)");
      expect(idle.blocks).toBeLessThan(few);
      const worker = await enlist(full);
      await add(full, "NULL");
      await pool.query(
        `SELECT * FROM holdfast.queue_claim_jobs(${full}, ${worker}, 10, '{0}', '{${gone}}', NULL, false, NULL)`,
      );
      await pool.query(`UPDATE holdfast.queue_worker SET beat = '-infinity' WHERE id = ${worker}`);
      const found = await explained("SELECT * FROM holdfast.queue_sweep(false)");
      expect(found.row["workers"]).toBe(1);
      expect(found.blocks).toBeLessThan(few);
      await explained("SELECT * FROM holdfast.queue_sweep(true)");
    });

    test("a look at queues that have nothing, and a count", async () => {
      const { full, fresh } = numbers;
      await pool.query("DELETE FROM holdfast.queue_ready; DELETE FROM holdfast.queue_grouped");
      const look = (whole: boolean) =>
        `SELECT holdfast.queue_look('{${full},${fresh}}', ARRAY[extract(epoch FROM clock_timestamp()) * 1000 - 5000, NULL],
          '{${full}}', '{0}', '{${gone + 1_000_000}}', ${whole}) AS ready`;
      const looked = await explained(look(false));
      expect(looked.row["ready"]).toEqual([]);
      expect(looked.blocks).toBeLessThan(few);
      await explained(look(true));
      // It counts up to 100,000: by the index, and no further.
      const counted = await explained(`SELECT * FROM holdfast.queue_count('{${full}}', NULL)`);
      expect(counted.row).toMatchObject({ name: "full", delayed: "100000" });
      await explained("SELECT * FROM holdfast.queue_count(NULL, NULL)");
    });
  });
});
