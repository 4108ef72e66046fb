/**
 * Tables of ours that do not show all of their rows, or do not keep what is written: row-level security for a plain role and for
 * the owner, a policy that lets rows in and hides them, a trigger that drops them. Every call ends, says so, and decides nothing.
 */
import { randomBytes } from "node:crypto";
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { type Holdfast, RowsHiddenError, fenced, holdfast, key, once } from "holdfast";
import { audited, trail } from "holdfast/audit";
import { fromPg } from "holdfast/pg";
import { jobs, queue, queues, workers } from "holdfast/queue";
import { quota, quotas, subjects } from "holdfast/quota";
import { runs, schedule, schedules } from "holdfast/schedule";
import { stock, stocks } from "holdfast/stock";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";

type Hf = Holdfast<unknown>;
type Call = (hf: Hf, byRows: Hf) => Promise<unknown>;

let made = 0;
const fresh = () => `n${++made}`;
const quotaOf = (hf: Hf) => quota(hf, { name: "q", limit: 100, per: "day" });
const nothing = async () => {};

/** Calls that are sent together, or one after the other: all of them are over, and none was granted. */
async function all(calls: readonly Promise<unknown>[]): Promise<unknown> {
  const [first, ...others] = await Promise.allSettled(calls);
  if (first?.status !== "rejected" || others.some(({ status }) => status !== "rejected")) return "granted";
  throw first.reason;
}

/** A worker of this queue until it reports trouble, which this throws. */
async function work(hf: Hf, name: string, handler: () => Promise<void> = nothing): Promise<void> {
  const trouble = Promise.withResolvers<unknown>();
  const hear = (message: unknown) => {
    const { queue: of, error } = message as { queue: string; error: unknown };
    if (of === name) trouble.resolve(error);
  };
  subscribe("holdfast:queue:trouble", hear);
  const worker = queue(hf, name, { retries: 0 }).work(handler);
  try {
    throw await trouble.promise;
  } finally {
    unsubscribe("holdfast:queue:trouble", hear);
    await worker.stop({ patienceMs: 100 });
  }
}

/** What touches a table: what writes a new row there, and what only looks or changes. */
const tables: Readonly<Record<string, { inserts?: Record<string, Call>; reads?: Record<string, Call> }>> = {
  quota_bucket: {
    inserts: {
      consume: (hf) => quotaOf(hf).consume(fresh()),
      "several at once": (hf) => all([fresh(), fresh(), fresh()].map((s) => quotaOf(hf).consume(s))),
      setLimit: (hf) => quotaOf(hf).setLimit(fresh(), 5),
      "consume in a transaction": (hf) => hf.transaction((tx) => quotaOf(hf).consume(fresh(), 1, { tx })),
    },
    reads: {
      peek: (hf) => quotaOf(hf).peek("ann"),
      subjects: (hf) => subjects(hf, "q"),
      quotas: (hf) => quotas(hf),
      reconcile: (hf) => quotaOf(hf).reconcile("ann"),
      prune: (hf) => quotaOf(hf).prune({ before: new Date() }),
    },
  },
  quota_line: {
    inserts: {
      consume: (hf) => quotaOf(hf).consume("ann"),
      "several at once": (hf) => all([1, 2, 3].map(() => quotaOf(hf).consume("ann"))),
      hold: (hf) => quotaOf(hf).hold("ann", 1),
      reset: (hf) => quotaOf(hf).reset("ann"),
    },
    reads: { history: (hf) => quotaOf(hf).history("ann"), reconcile: (hf) => quotaOf(hf).reconcile("ann") },
  },
  quota_hold: {
    inserts: { hold: (hf) => quotaOf(hf).hold("ann", 1) },
    reads: { peek: (hf) => quotaOf(hf).peek("ann") },
  },
  quota_grant: {
    inserts: { grant: (hf) => quotaOf(hf).grant("ann", 1) },
    reads: { grants: (hf) => quotaOf(hf).grants("ann"), peek: (hf) => quotaOf(hf).peek("ann") },
  },
  stock_level: {
    inserts: {
      increase: (hf) => stock(hf).increase(fresh(), 1),
      "an order of several": (hf) => stock(hf).apply([fresh(), fresh()].map((sku) => ({ sku, quantity: 1 }))),
      "several at once": (hf) => all([fresh(), fresh()].map((sku) => stock(hf).increase(sku, 1))),
      setMinimum: (hf) => stock(hf).setMinimum(fresh(), 0),
    },
    reads: {
      level: (hf) => stock(hf).level("CAP"),
      levels: (hf) => stock(hf).levels(),
      stocks: (hf) => stocks(hf),
      levelAt: (hf) => stock(hf).levelAt("CAP", new Date()),
      decrease: (hf) => stock(hf).decrease("CAP", 1),
    },
  },
  stock_movement: {
    inserts: {
      increase: (hf) => stock(hf).increase("CAP", 1),
      "an order of several": (hf) => stock(hf).apply(["CAP", "MUG"].map((sku) => ({ sku, quantity: -1 }))),
      "several at once": (hf) => all([1, 2, 3].map(() => stock(hf).increase("CAP", 1))),
      adjustTo: (hf) => stock(hf).adjustTo("CAP", 7),
    },
    reads: {
      history: (hf) => stock(hf).history({ sku: "CAP" }),
      byChannel: (hf) => stock(hf).byChannel(),
      levelAt: (hf) => stock(hf).levelAt("CAP", new Date()),
      reconcile: (hf) => stock(hf).reconcile(),
    },
  },
  stock_reservation: { inserts: { reserve: (hf) => stock(hf).reserve([{ sku: "CAP", quantity: 1 }]) } },
  stock_reserved: {
    inserts: { reserve: (hf) => stock(hf).reserve([{ sku: "CAP", quantity: 1 }]) },
    reads: { level: (hf) => stock(hf).level("CAP"), reconcile: (hf) => stock(hf).reconcile() },
  },
  queue: {
    inserts: { enqueue: (hf) => queue(hf, fresh()).enqueue(1), work: (hf) => work(hf, fresh()) },
    reads: { jobs: (hf) => jobs(hf, "waits", { state: "waiting" }), queues: (hf) => queues(hf) },
  },
  queue_key: { inserts: { enqueue: (hf) => queue(hf, "waits").enqueue(1, { key: fresh() }) } },
  queue_ready: {
    inserts: {
      enqueue: (hf) => queue(hf, "waits").enqueue(1),
      "enqueue with a key": (hf) => queue(hf, "waits").enqueue(1, { key: fresh() }),
    },
    reads: {
      jobs: (hf) => jobs(hf, "waits", { state: "waiting" }),
      counts: (hf) => queue(hf, "waits").counts(),
    },
  },
  queue_delayed: {
    inserts: { enqueue: (hf) => queue(hf, "waits").enqueue(1, { delayMs: 60_000 }) },
    reads: { jobs: (hf) => jobs(hf, "waits", { state: "delayed" }) },
  },
  queue_grouped: {
    inserts: { enqueue: (hf) => queue(hf, "waits").enqueue(1, { group: "g" }) },
    reads: { counts: (hf) => queue(hf, "waits").counts() },
  },
  queue_group: { inserts: { enqueue: (hf) => queue(hf, "waits").enqueue(1, { group: fresh() }) } },
  queue_failed: {
    reads: {
      failed: (hf) => queue(hf, "waits").failed(),
      jobs: (hf) => jobs(hf, "waits", { state: "failed" }),
      retry: (hf) => queue(hf, "waits").retry(),
      prune: (hf) => queue(hf, "waits").prune({ before: new Date() }),
    },
  },
  queue_worker: { inserts: { work: (hf) => work(hf, "waits") }, reads: { workers: (hf) => workers(hf) } },
  queue_lease: {
    inserts: { work: (hf) => work(hf, "waits") },
    reads: { jobs: (hf) => jobs(hf, "waits", { state: "running" }), queues: (hf) => queues(hf) },
  },
  queue_mark: { reads: { jobs: (hf) => jobs(hf, "waits", { state: "running" }) } },
  schedule: {
    inserts: { runNow: (hf) => schedule(hf, fresh(), { every: "1 day" }, nothing).runNow() },
    reads: {
      schedules: (hf) => schedules(hf),
      runs: (hf) => runs(hf, "nightly"),
      pause: (hf) => schedule(hf, "nightly", { every: "1 day" }, nothing).pause(),
    },
  },
  schedule_run: {
    inserts: { runNow: (hf) => schedule(hf, "nightly", { every: "1 day" }, nothing).runNow() },
    reads: { runs: (hf) => runs(hf, "nightly"), schedules: (hf) => schedules(hf) },
  },
  resource: { inserts: { lease: (hf) => hf.lease(key("r", fresh()), { wait: "skip" }) } },
  lease: {
    inserts: { lease: (hf) => hf.lease(key("r", fresh()), { wait: "skip" }) },
    reads: { leases: (hf) => hf.leases() },
  },
  origin: { reads: { lease: (hf) => hf.lease(key("r", fresh()), { wait: "skip" }) } },
  lock: {
    inserts: {
      "a transaction's first lock": (_, byRows) => byRows.lock(key("l", fresh()), nothing),
      "a later one": (_, byRows) => byRows.transaction((tx) => tx.lock(key("l", fresh()))),
    },
  },
  once: {
    inserts: { once: (hf) => once(hf, ["o", fresh()], async () => 1) },
    reads: { "once again": (hf) => once(hf, ["o", "known"], async () => 2) },
  },
  audit: {
    inserts: { audited: (hf) => audited(hf, { action: "a", target: "t", actor: "me" }, async () => 1) },
    reads: { trail: (hf) => trail(hf) },
  },
  migration: { reads: { migrations: (hf) => hf.migrations() } },
  routine: { reads: { migrations: (hf) => hf.migrations() } },
};

const drop = "CREATE TRIGGER drops BEFORE INSERT ON %s FOR EACH ROW EXECUTE FUNCTION public.drops()";
const modes = {
  "row-level security without a policy, for a plain role": {
    as: "app",
    policy: true,
    set: ["ALTER TABLE %s ENABLE ROW LEVEL SECURITY"],
    unset: ["ALTER TABLE %s DISABLE ROW LEVEL SECURITY"],
  },
  "row-level security that is forced on the owner": {
    as: "owner",
    policy: true,
    set: ["ALTER TABLE %s ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"],
    unset: ["ALTER TABLE %s DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY"],
  },
  "a policy that lets rows in and hides them": {
    as: "app",
    policy: true,
    set: [
      "ALTER TABLE %s ENABLE ROW LEVEL SECURITY",
      "CREATE POLICY blind ON %s FOR INSERT WITH CHECK (true)",
    ],
    unset: ["DROP POLICY blind ON %s", "ALTER TABLE %s DISABLE ROW LEVEL SECURITY"],
  },
  "a trigger that drops what is inserted": {
    as: "app",
    policy: false,
    set: [drop],
    unset: ["DROP TRIGGER drops ON %s"],
  },
} as const;

describe.each(["postgres", "postgresOld"] as const)("%s", (server) => {
  const why = unavailable(server);
  const suffix = randomBytes(4).toString("hex");
  let database: TestDatabase;
  let admin: Client;
  const pools: Pool[] = [];
  const instances: Partial<Record<"owner" | "app", { hf: Hf; byRows: Hf }>> = {};

  const urlOf = (role: "owner" | "app") => {
    const url = new URL(database.url);
    url.username = `hf_${role}_${suffix}`;
    url.password = "secret";
    return url.href;
  };

  beforeEach(({ skip }) => skip(why !== undefined, why));
  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    admin = new Client({ connectionString: database.url });
    await admin.connect();
    for (const role of ["owner", "app"] as const) {
      await admin.query(`CREATE ROLE hf_${role}_${suffix} LOGIN PASSWORD 'secret'`);
      const pool = new Pool({ connectionString: urlOf(role), max: 10 });
      pools.push(pool);
      const options = { hazards: "off", wrongConnection: "off" } as const;
      instances[role] = {
        hf: holdfast(fromPg(pool), options),
        byRows: holdfast(fromPg(pool), { ...options, strategy: "lock row" }),
      };
    }
    await admin.query(`GRANT CREATE ON DATABASE ${database.name} TO hf_owner_${suffix}`);
    await instances.owner?.hf.migrate();
    await admin.query(`GRANT USAGE ON SCHEMA holdfast TO hf_app_${suffix};
      GRANT ALL ON ALL TABLES IN SCHEMA holdfast TO hf_app_${suffix};
      GRANT ALL ON ALL SEQUENCES IN SCHEMA holdfast TO hf_app_${suffix};
      CREATE FUNCTION public.drops() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
      CREATE FUNCTION public.drops_slowly() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.2); RETURN NULL; END'`);
    // What hidden rows are about; and instances that have seen everything go well.
    for (const { hf, byRows } of Object.values(instances)) {
      await quotaOf(hf).consume("ann", 3);
      await quotaOf(hf).grant("ann", 3);
      await stock(hf).apply(["CAP", "MUG"].map((sku) => ({ sku, quantity: 10 })));
      await queue(hf, "waits").enqueue(1);
      await schedule(hf, "nightly", { every: "1 day" }, nothing).runNow();
      await (await hf.lease(key("r", fresh()))).release();
      await byRows.lock(key("l", fresh()), nothing);
      await once(hf, ["o", "known"], async () => 1);
      await audited(hf, { action: "a", target: "t", actor: "me" }, async () => 1);
    }
  }, 60_000);
  afterAll(async () => {
    for (const { hf, byRows } of Object.values(instances)) {
      await hf.close();
      await byRows.close();
    }
    for (const pool of pools) await pool.end();
    if (admin !== undefined) {
      for (const role of ["owner", "app"]) {
        await admin.query(`DROP OWNED BY hf_${role}_${suffix} CASCADE`);
        await admin.query(`DROP ROLE hf_${role}_${suffix}`);
      }
      await admin.end();
    }
    await database?.drop();
  });

  const busy = async () => {
    const { rows } = await admin.query<{ query: string }>(
      "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle' AND backend_type = 'client backend'",
    );
    return rows.map(({ query }) => query);
  };

  async function during<T>(
    mode: { set: readonly string[]; unset: readonly string[] },
    table: string,
    body: () => Promise<T>,
  ) {
    const run = async (statements: readonly string[]) => {
      for (const each of statements) await admin.query(each.replaceAll("%s", `holdfast.${table}`));
    };
    await run(mode.set);
    try {
      return await body();
    } finally {
      await run(mode.unset);
    }
  }

  describe.each(Object.entries(modes))("%s", (_, mode) => {
    test.each(Object.keys(tables))("%s", { timeout: 60_000 }, async (table) => {
      const { hf, byRows } = instances[mode.as] as { hf: Hf; byRows: Hf };
      const { inserts = {}, reads = {} } = tables[table] ?? {};
      const calls = { ...inserts, ...(mode.policy && reads) };
      const told: Record<string, unknown> = {};
      await during(mode, table, async () => {
        for (const [name, call] of Object.entries(calls)) {
          const late = AbortSignal.timeout(10_000);
          const over = new Promise((resolve) => {
            late.addEventListener("abort", () => resolve("no answer after 10 s"));
          });
          told[name] = await Promise.race([call(hf, byRows).catch((error: unknown) => error), over]);
        }
        await eventually(async () => expect(await busy()).toEqual([]));
      });
      for (const [name, answer] of Object.entries(told)) {
        expect(answer, name).toBeInstanceOf(RowsHiddenError);
        const { code, table: of, message, retryable } = answer as RowsHiddenError;
        expect({ code, retryable }, name).toEqual({ code: "HF_ROWS_HIDDEN", retryable: false });
        expect(of.split(", "), name).toContain(`holdfast.${table}`);
        expect(message, name).toMatch(mode.policy ? /row-level security/i : /trigger/);
      }
    });
  });

  test("nothing was kept of all that, and all is well again", async () => {
    for (const { hf, byRows } of Object.values(instances)) {
      expect((await quotaOf(hf).peek("ann")).used).toBe(6);
      expect((await quotaOf(hf).reconcile("ann")).findings).toEqual([]);
      expect((await stock(hf).level("CAP")).onHand).toBe(20);
      await (await hf.lease(key("r", fresh()))).release();
      await byRows.lock(key("l", fresh()), nothing);
      expect(await once(hf, ["o", "known"], async () => 2)).toMatchObject({ value: 1 });
    }
  });

  test("a lease that is held when its rows are hidden is not told to be lost", async () => {
    const { hf } = instances.app as { hf: Hf };
    const lease = await hf.lease(key("r", fresh()), { ttl: 60_000 });
    const mode = modes["row-level security without a policy, for a plain role"];
    const answer = await during(mode, "lease", () =>
      hf.transaction((tx) => fenced(tx, lease)).catch((error: unknown) => error),
    );
    expect(answer).toBeInstanceOf(RowsHiddenError);
    await hf.transaction((tx) => fenced(tx, lease));
    await lease.release();
  });

  test("policies of the caller's own table apply to stock that is kept there", async () => {
    await admin.query(`CREATE TABLE public.item (sku text PRIMARY KEY, tenant text NOT NULL, pieces int NOT NULL);
        INSERT INTO public.item VALUES ('A', 'us', 5), ('B', 'them', 5);
        GRANT ALL ON public.item TO hf_app_${suffix};
        ALTER TABLE public.item ENABLE ROW LEVEL SECURITY;
        CREATE POLICY ours ON public.item USING (tenant = 'us')`);
    const { hf } = instances.app as { hf: Hf };
    const shelf = stock(hf, { name: "own", levels: { table: "item", sku: "sku", onHand: "pieces" } });
    await shelf.decrease("A", 2);
    expect((await shelf.levels()).map(({ sku, onHand }) => [sku, onHand])).toEqual([["A", 3]]);
    expect((await admin.query("SELECT pieces FROM public.item ORDER BY sku")).rows).toEqual([
      { pieces: 3 },
      { pieces: 5 },
    ]);
  });

  test(
    "a client that is killed while a function makes a row again and again leaves no backend behind",
    { timeout: 60_000 },
    async () => {
      const mode = {
        ...modes["a trigger that drops what is inserted"],
        set: [drop.replace("drops()", "drops_slowly()")],
      };
      for (const [table, call] of [
        ["resource", "lease"],
        ["schedule", "schedule"],
        ["quota_bucket", "quota"],
      ] as const)
        await during(mode, table, async () => {
          const client = startWorker(new URL("./workers/hidden-rows.ts", import.meta.url), {
            url: urlOf("app"),
            call,
          });
          // It is in the trigger, which is in the loop.
          await eventually(async () => expect((await busy()).length, call).toBeGreaterThan(0));
          client.sigkill();
          await client.exited;
          await eventually(async () => expect(await busy(), call).toEqual([]));
        });
    },
  );
});
