/** `holdfast import`: jobs of pg-boss and graphile-worker, moved while workers of both sides run. */
import { makeWorkerUtils } from "graphile-worker";
import { type Holdfast, holdfast } from "holdfast";
import { trail } from "holdfast/audit";
import { fromPg } from "holdfast/pg";
import { jobs, queue } from "holdfast/queue";
import { Pool, type PoolClient } from "pg";
import { PgBoss } from "pg-boss";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type Outcome, command, start } from "./harness/command.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { ImportArg, Payload } from "./workers/import.ts";

const many = 10_000;
const late = many / 10;
const due = new Date(Date.now() + 3_600_000);

interface Side {
  readonly name: "pg-boss" | "graphile-worker";
  /** Makes its tables, and adds so many jobs to the queue. */
  fill(url: string, queue: string): Promise<void>;
}

/** Every tenth is due in an hour, every hundredth fails the first time, every twentieth is of a group. */
const payloads: readonly (Payload & { readonly later: boolean })[] = Array.from({ length: many }, (_, n) => ({
  n,
  later: n % 10 === 3,
  ...(n % 100 === 7 && { fails: true }),
}));

async function withBoss<T>(url: string, work: (boss: PgBoss) => Promise<T>): Promise<T> {
  const boss = new PgBoss({ connectionString: url, max: 2, supervise: false, schedule: false });
  boss.on("error", () => {});
  await boss.start();
  try {
    return await work(boss);
  } finally {
    await boss.stop({ graceful: false });
  }
}

async function withGraphile<T>(
  url: string,
  work: (utils: Awaited<ReturnType<typeof makeWorkerUtils>>) => Promise<T>,
): Promise<T> {
  const utils = await makeWorkerUtils({ connectionString: url });
  try {
    await utils.migrate();
    return await work(utils);
  } finally {
    await utils.release();
  }
}

const sides: readonly Side[] = [
  {
    name: "pg-boss",
    fill: (url, name) =>
      withBoss(url, async (boss) => {
        await boss.createQueue(name, { retryLimit: 3, retryDelay: 1 });
        await boss.insert(
          name,
          payloads.map(({ later, ...data }) => ({ data, ...(later && { startAfter: due }) })),
        );
      }),
  },
  {
    name: "graphile-worker",
    fill: (url, name) =>
      withGraphile(url, async (utils) => {
        await utils.addJobs(
          payloads.map(({ later, ...payload }) => {
            const group = payload.n % 20 === 5 ? `group ${payload.n % 3}` : undefined;
            return {
              identifier: name,
              payload: group === undefined ? payload : { ...payload, group },
              maxAttempts: 4,
              ...(group !== undefined && { queueName: group }),
              ...(later && { runAt: due }),
            };
          }),
        );
      }),
  },
];

describe.each(sides)("$name", ({ name: side, fill }) => {
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolClient>;

  beforeAll(async () => {
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 3 });
    hf = holdfast(fromPg(pool));
    await hf.migrate();
    await pool.query(
      `CREATE TABLE began (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job int NOT NULL, side text NOT NULL, grp text,
        at timestamptz NOT NULL DEFAULT clock_timestamp(), ended timestamptz, failed boolean)`,
    );
    await pool.query("CREATE INDEX ON began (job)");
  });

  afterAll(async () => {
    await hf?.close();
    await pool?.end();
    await database?.drop();
  });

  test(`${many} jobs, while workers of both sides run in several processes: none lost, none twice`, async () => {
    await fill(database.url, "emails");
    const crew: Worker[] = (["holdfast", "holdfast", side, side] as const).map((each) =>
      startWorker(new URL("./workers/import.ts", import.meta.url), {
        side: each,
        url: database.url,
        queue: "emails",
      } satisfies ImportArg),
    );
    try {
      await Promise.all(crew.map((each) => each.message("ready")));
      // Until they are at it, and some have failed.
      await eventually(async () => {
        const { rows } = await pool.query("SELECT count(*) > 200 AND bool_or(failed) AS yes FROM began");
        return rows[0].yes as boolean;
      });
      const outcome = await command(["import", side, "--yes", "--wait", "120", "--json"], {
        env: { HOLDFAST_URL: database.url },
      });
      expect(outcome.code, outcome.err + outcome.out).toBe(0);
      const told = JSON.parse(outcome.out);
      const [moved] = told.queues;
      expect(moved).toMatchObject({ from: "emails", to: "emails", keyTaken: 0, unfit: [] });
      expect(moved.waiting, outcome.out).toBeGreaterThan(1000);
      expect(moved.scheduled, outcome.out).toBe(late);
      expect(told.left).toEqual([
        { name: "emails", waiting: 0, scheduled: 0, retrying: 0, active: 0, tied: 0 },
      ]);
      await eventually(
        async () => {
          const { rows } = await pool.query("SELECT count(*)::int AS n FROM began WHERE NOT failed");
          expect(rows[0].n).toBeGreaterThanOrEqual(many - late);
        },
        { timeout: 120_000, interval: 100 },
      );
      await eventually(async () => {
        expect(await queue(hf, "emails").counts()).toMatchObject({ waiting: 0, delayed: late, running: 0 });
      });
      const { rows: sums } = await pool.query(
        `SELECT count(*) FILTER (WHERE NOT failed)::int AS done, count(DISTINCT job)::int AS jobs, count(*) FILTER (WHERE failed)::int AS failed,
          count(*) FILTER (WHERE side = 'holdfast' AND NOT failed)::int AS ours FROM began`,
      );
      const done = many - late;
      expect(sums).toEqual([{ done, jobs: done, failed: many / 100, ours: told.moved - late }]);
      // One of a group at a time, also while some are here and some there.
      const { rows: both } = await pool.query(
        "SELECT a.job, b.job FROM began a JOIN began b ON a.grp = b.grp AND a.id <> b.id AND a.at < b.at AND b.at < a.ended",
      );
      expect(both).toEqual([]);
      expect(await queue(hf, "emails").failed()).toEqual([]);
      expect((await trail(hf, { limit: 1 }))[0]).toMatchObject({ action: "queue.import", outcome: "done" });
    } finally {
      for (const each of crew) each.sigkill();
      await Promise.all(crew.map(({ exited }) => exited));
    }
  }, 300_000);
});

describe("what maps to what", () => {
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolClient>;
  const run = (...args: string[]) => command(args, { env: { HOLDFAST_URL: database.url } });
  const complaint = ({ code, out, err }: Outcome): string => {
    expect(code, out).toBe(2);
    expect(out).toBe("");
    return err;
  };
  const told = ({ code, out, err }: Outcome) => {
    expect(code, err).toBe(0);
    return JSON.parse(out);
  };
  /** Of a queue of Holdfast's, what was moved into it, by its payload. */
  const kept = async (name: string) => {
    const all = await Promise.all(
      (["waiting", "delayed"] as const).map((state) => jobs(hf, name, { state, limit: 100 })),
    );
    const views = await Promise.all(
      all.flatMap((page) => page?.jobs ?? []).map(({ id }) => queue(hf, name).inspect(id)),
    );
    return views.map((view) => ({
      payload: view?.payload,
      state: view?.state,
      priority: view?.priority,
      failures: view?.failures,
      key: view?.key,
      group: view?.group,
      ...(view?.runAt !== undefined && { runAt: new Date(view.runAt) }),
    }));
  };
  const plain = { state: "waiting", priority: 0, failures: 0, key: undefined, group: undefined };

  beforeAll(async () => {
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 3 });
    hf = holdfast(fromPg(pool));
  });

  afterAll(async () => {
    await hf?.close();
    await pool?.end();
    await database?.drop();
  });

  test("says what is not there, and what is not known", async () => {
    expect(complaint(await run("import", "pg-boss", "--yes"))).toContain(
      "pg-boss has no tables here: there is no pgboss.version. If they are in another schema, name it with --peer-schema.",
    );
    expect(complaint(await run("import", "graphile-worker", "--peer-schema", "jobs"))).toContain(
      "there is no jobs.migrations",
    );
    expect(complaint(await run("import", "bullmq"))).toContain("pg-boss and graphile-worker are known");
    expect(complaint(await command(["import", "pg-boss", "--url", "mysql://app@localhost/shop"]))).toContain(
      "jobs are moved within a database",
    );
    await pool.query(
      "CREATE SCHEMA old; CREATE TABLE old.version (version int); INSERT INTO old.version VALUES (7)",
    );
    expect(complaint(await run("import", "pg-boss", "--peer-schema", "old", "--yes"))).toContain(
      "of version 7, and versions 26 to 43 are known (pg-boss 11.1 to 12.35). Update pg-boss first.",
    );
  });

  test("pg-boss", async () => {
    const far = new Date(Date.now() + 86_400_000);
    await withBoss(database.url, async (boss) => {
      await boss.createQueue("emails", { retryLimit: 4, retryDelay: 30 });
      await boss.createQueue("welcome", { policy: "exclusive" });
      await boss.createQueue("invoices", { policy: "singleton" });
      await boss.createQueue("steps");
      await boss.send("emails", { n: 1 });
      await boss.send("emails", { n: 2 }, { priority: 5, startAfter: far });
      await boss.send("emails", { n: 3 }, { priority: -7, singletonKey: "nothing" });
      await boss.send("emails", { n: 4 }, { group: { id: "tenant" } });
      await boss.send("emails", { long: "x".repeat(1024 * 1024 + 1) });
      for (const key of ["ann", "bob"]) await boss.send("welcome", { key }, { singletonKey: key });
      for (const key of ["a", "a", "b", "b"]) await boss.send("invoices", { key }, { singletonKey: key });
      const failed = await boss.send("emails", { n: 5 }, { priority: 9 });
      const [one] = await boss.fetch("emails", { batchSize: 1 });
      expect(one?.id).toBe(failed);
      await boss.fail("emails", one?.id as string);
      // With a worker of theirs: of the second queue one, and the key of the third.
      expect(await boss.fetch("invoices", { batchSize: 1 })).toMatchObject([{ data: { key: "a" } }]);
      await boss.schedule("emails", "0 3 * * *", { nightly: true }, { tz: "Europe/Madrid" });
      await pool.query("INSERT INTO pgboss.job (name, data, blocked) VALUES ('steps', '{}', true)");
    });
    expect(await run("import", "pg-boss", "--yes")).toMatchObject({
      code: 2,
      err: expect.stringContaining("run holdfast migrate"),
    });
    await hf.migrate();
    // One that was enqueued by new code already.
    await queue(hf, "welcome").enqueue({ key: "bob" }, { key: "bob" });

    const shown = await run("import", "pg-boss", "--dry-run");
    expect(shown.code).toBe(0);
    expect(shown.out).toMatch(/^emails +emails +4 +1 +1 +0 +0$/m);
    expect(shown.out).toMatch(/^invoices +invoices +3 +0 +0 +1 +0$/m);
    expect(shown.out).toMatch(/^steps +steps +0 +0 +0 +0 +1$/m);
    expect(shown.out).toContain('const emails = queue(hf, "emails", { retries: 4, backoff: () => 30000 });');
    expect(shown.out).toContain(
      'schedule(hf, "emails", { cron: "0 3 * * *", timeZone: "Europe/Madrid" }, async () => {\n    await emails.enqueue({"nightly":true});',
    );
    expect(shown.out).toContain("the policy standard makes nothing of it");
    expect(complaint(await run("import", "pg-boss", "--queue", "email"))).toContain(
      'pg-boss has no queue "email". It has "emails", "invoices", "steps", "welcome".',
    );
    expect((await run("import", "pg-boss", "--queue", "emails")).err).toContain("add --yes");

    const result = told(
      await run(
        "import",
        "pg-boss",
        "--queue",
        "emails=mails",
        "welcome",
        "invoices",
        "steps",
        "--yes",
        "--json",
      ),
    );
    expect(result).toMatchObject({
      moved: 8,
      queues: [
        { from: "emails", to: "mails", waiting: 3, scheduled: 1, retrying: 1, keyTaken: 0 },
        { from: "welcome", to: "welcome", waiting: 1, keyTaken: 1 },
        { from: "invoices", to: "invoices", waiting: 2 },
        { from: "steps", waiting: 0 },
      ],
      left: [
        { name: "emails", waiting: 1 },
        { name: "invoices", waiting: 1, active: 1 },
        { name: "steps", tied: 1 },
        { name: "welcome", waiting: 1 },
      ],
    });
    expect(result.queues[0].unfit).toEqual([
      { id: expect.any(String), why: expect.stringContaining("bytes of JSON, and 1048576 are the most") },
    ]);
    const mails = await kept("mails");
    expect(mails).toHaveLength(5);
    expect(mails).toEqual(
      expect.arrayContaining([
        { ...plain, payload: { n: 1 } },
        { ...plain, payload: { n: 2 }, state: "delayed", priority: -5, runAt: far },
        { ...plain, payload: { n: 3 }, priority: 7 },
        { ...plain, payload: { n: 4 }, group: "tenant" },
        expect.objectContaining({ payload: { n: 5 }, state: "delayed", priority: -9, failures: 1 }),
      ]),
    );
    expect(new Set((await kept("welcome")).map(({ key }) => key))).toEqual(new Set(["ann", "bob"]));
    // Of "a" one is with their worker: two of a key would run at the same time.
    expect(await kept("invoices")).toEqual([
      { ...plain, payload: { key: "b" }, group: "b" },
      { ...plain, payload: { key: "b" }, group: "b" },
    ]);
    const again = await run("import", "pg-boss", "--queue", "welcome", "--yes");
    expect(again.out).toContain(
      '0 jobs moved.\n1 job of "welcome" stayed: there are jobs with these keys in "welcome".\n',
    );
  });

  test("stopped in the middle: nothing was moved", async () => {
    await hf.migrate();
    await withBoss(database.url, async (boss) => {
      await boss.createQueue("stopped", { policy: "short" });
      for (const singletonKey of ["a", "b", "c"]) await boss.send("stopped", {}, { singletonKey });
    });
    const stopped = queue(hf, "stopped");
    await hf.transaction(async (tx) => {
      // It waits for the end of this one, with some added already.
      await stopped.enqueue({}, { key: "c", tx });
      const running = start(["import", "pg-boss", "--queue", "stopped", "--yes"], {
        env: { HOLDFAST_URL: database.url },
      });
      await eventually(async () => {
        const { rowCount } = await hf.outside(() =>
          pool.query(
            "SELECT FROM pg_stat_activity WHERE application_name LIKE 'holdfast import%' AND wait_event_type = 'Lock'",
          ),
        );
        return rowCount === 1;
      });
      running.child.kill("SIGINT");
      // 2: on a machine that is so slow that it had given up by then.
      expect([130, 2]).toContain((await running.done).code);
    });
    expect(await stopped.counts()).toMatchObject({ waiting: 1, delayed: 0 });
    const { rows } = await pool.query("SELECT count(*)::int AS n FROM pgboss.job WHERE name = 'stopped'");
    expect(rows).toEqual([{ n: 3 }]);
  });

  test("graphile-worker", async () => {
    await hf.migrate();
    const far = new Date(Date.now() + 86_400_000);
    await withGraphile(database.url, async (utils) => {
      await utils.addJob("send", { n: 1 });
      await utils.addJob("send", { n: 2 }, { runAt: far, priority: 3, jobKey: "two", maxAttempts: 5 });
      await utils.addJob("send", [3], { queueName: "one by one", priority: -4 });
      await utils.addJob("send", { n: 4 }, { queueName: "busy" });
      await utils.addJob("send", { n: 5 }, { queueName: "busy" });
      await utils.addJob("send", { n: 6 }, { flags: ["slow"] });
    });
    // As its worker does when it begins one, and when one has failed.
    await pool.query(
      `UPDATE graphile_worker._private_job_queues SET locked_at = now(), locked_by = 'w' WHERE queue_name = 'busy';
       UPDATE graphile_worker._private_jobs SET locked_at = now(), locked_by = 'w', attempts = 1 WHERE payload->>'n' = '4';
       UPDATE graphile_worker._private_jobs SET attempts = 2 WHERE payload->>'n' = '6'`,
    );
    const plan = told(await run("import", "graphile-worker", "--dry-run", "--json"));
    expect(plan).toMatchObject({
      version: 20,
      queues: [{ name: "send", to: "send", waiting: 3, scheduled: 1, retrying: 1, active: 1 }],
    });
    expect(plan.queues[0].remarks.join(" ")).toMatch(/2 jobs in named queues.*1 job with flags/);
    const { out } = await run("import", "graphile-worker", "--yes");
    expect(out).toContain(
      "4 jobs moved.\n1 job with workers of graphile-worker, which end them.\n1 job waiting there",
    );
    const moved = await kept("send");
    expect(moved).toHaveLength(4);
    expect(moved).toEqual(
      expect.arrayContaining([
        { ...plain, payload: { n: 1 } },
        { ...plain, payload: { n: 2 }, state: "delayed", priority: 3, key: "two", runAt: far },
        { ...plain, payload: [3], priority: -4, group: "one by one" },
        { ...plain, payload: { n: 6 }, failures: 2 },
      ]),
    );
    // It ends, and what waited for it comes.
    const waiting = run("import", "graphile-worker", "--yes", "--wait", "60", "--json");
    await pool.query(
      `DELETE FROM graphile_worker._private_jobs WHERE payload->>'n' = '4';
       UPDATE graphile_worker._private_job_queues SET locked_at = NULL, locked_by = NULL`,
    );
    expect(told(await waiting)).toMatchObject({ moved: 1, left: [{ waiting: 0, active: 0 }] });
    // Somebody else sees none of its rows.
    const role = `import_${process.pid}`;
    await pool.query(
      `CREATE ROLE ${role} LOGIN PASSWORD 'secret'; GRANT USAGE ON SCHEMA graphile_worker TO ${role};
       GRANT SELECT ON ALL TABLES IN SCHEMA graphile_worker TO ${role}`,
    );
    try {
      const url = new URL(database.url);
      [url.username, url.password] = [role, "secret"];
      expect(complaint(await command(["import", "graphile-worker", "--url", url.href]))).toContain(
        `${role} sees no row of graphile_worker._private_jobs (row security)`,
      );
    } finally {
      await pool.query(`DROP OWNED BY ${role}; DROP ROLE ${role}`);
    }
  });
});
