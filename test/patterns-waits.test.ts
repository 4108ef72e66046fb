/** Calls of patterns that have to wait, are aborted, or lose their answer: what callers are told is what happened. */
import { HoldfastError, LockTimeoutError, OutcomeUnknownError, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let pool: Pool;
/** Somebody else, who holds things. */
let theirs: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 20 });
  theirs = new Pool({ connectionString: database.url, max: 10 });
  await holdfast(fromPg(pool)).migrate();
});
afterAll(async () => {
  await pool?.end();
  await theirs?.end();
  await database?.drop();
});

let made = 0;
const named = () => `waits${++made}`;

/** Backends of this database that wait for a lock. */
async function waiting(): Promise<number> {
  const { rows } = await theirs.query<{ n: number }>(
    "SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
  );
  return rows[0]?.n ?? 0;
}

/** A transaction of somebody else's that has done something, until it is told to end. */
async function holding(work: (hf: object, tx: never) => Promise<unknown>) {
  const hf = holdfast(fromPg(theirs));
  const begun = Promise.withResolvers<void>();
  const end = Promise.withResolvers<void>();
  const done = hf.transaction(async (tx) => {
    await work(hf, tx as never);
    begun.resolve();
    await end.promise;
  });
  done.catch(begun.reject);
  await begun.promise;
  return async () => {
    end.resolve();
    await done;
    await hf.close();
  };
}

async function errorOf(call: Promise<unknown>): Promise<unknown> {
  return call.then(
    (value) => new Error(`it was answered: ${JSON.stringify(value)}`),
    (error: unknown) => error,
  );
}

const shop = (hf: object, name: string) => stock(hf as never, { name });

/** A call that others' transactions hold up, what holds it up, and what has come of both. */
const calls = {
  "quota.consume": {
    hold: (hf: object, name: string, tx: never) =>
      quota(hf as never, { name, limit: 100 }).consume("ada", 1, { tx }),
    call: (hf: object, name: string, signal?: AbortSignal) =>
      quota(hf as never, { name, limit: 100 }).consume("ada", 1, { signal }),
    applied: async (hf: object, name: string) =>
      (await quota(hf as never, { name, limit: 100 }).peek("ada")).used - 1,
  },
  "quota.grant": {
    hold: (hf: object, name: string, tx: never) =>
      quota(hf as never, { name, limit: 100 }).grant("ada", 1, { tx }),
    call: (hf: object, name: string, signal?: AbortSignal) =>
      quota(hf as never, { name, limit: 100 }).grant("ada", 1, { signal }),
    applied: async (hf: object, name: string) =>
      (await quota(hf as never, { name, limit: 100 }).peek("ada")).credit - 1,
  },
  "stock.apply": {
    hold: (hf: object, name: string, tx: never) => shop(hf, name).increase("cap", 100, { tx }),
    call: (hf: object, name: string, signal?: AbortSignal) => shop(hf, name).increase("cap", 1, { signal }),
    applied: async (hf: object, name: string) => (await shop(hf, name).level("cap")).onHand - 100,
  },
  enqueue: {
    hold: (hf: object, name: string, tx: never) => queue(hf, name).enqueue(1, { key: "k", tx }),
    call: (hf: object, name: string, signal?: AbortSignal) =>
      queue(hf, name).enqueue(1, { key: "k", onDuplicate: "replace", signal }),
    applied: async (hf: object, name: string) => (await queue(hf, name).counts()).waiting - 1,
  },
};

describe.each(Object.entries(calls))(
  "%s that somebody's transaction holds up",
  (_, { hold, call, applied }) => {
    test("gives up after `wait`, and nothing of it is applied later", async () => {
      const name = named();
      const hf = holdfast(fromPg(pool), { wait: 700 });
      // Known, so that nothing else is waited for.
      await queue(hf, name).counts();
      const end = await holding((other, tx) => hold(other, name, tx));
      let most = 0;
      let over = false;
      const watch = (async () => {
        while (!over) most = Math.max(most, await waiting());
      })();
      const errors = await Promise.all(Array.from({ length: 40 }, () => errorOf(call(hf, name))));
      over = true;
      await watch;
      for (const error of errors) {
        expect(error).toBeInstanceOf(LockTimeoutError);
        expect(error).toMatchObject({ code: "HF_LOCK_TIMEOUT", retryable: true });
      }
      expect(most).toBeLessThanOrEqual(10);
      expect(await waiting()).toBe(0);
      await end();
      expect(await applied(hf, name)).toBe(0);
      await hf.close();
    });

    test("ends when its signal aborts, and nothing of it is applied later; who came together with it is served", async () => {
      const name = named();
      const hf = holdfast(fromPg(pool), { wait: 60_000 });
      await queue(hf, name).counts();
      const end = await holding((other, tx) => hold(other, name, tx));
      const abort = new AbortController();
      const unwanted = Array.from({ length: 5 }, () => errorOf(call(hf, name, abort.signal)));
      const wanted = call(hf, name);
      await eventually(async () => (await waiting()) > 0);
      abort.abort(new Error("no more"));
      for (const error of await Promise.all(unwanted)) expect(error).toMatchObject({ message: "no more" });
      await end();
      await wanted;
      // A job in the place of another is one.
      expect(await applied(hf, name)).toBe(call === calls.enqueue.call ? 0 : 1);
      expect(await waiting()).toBe(0);
      await hf.close();
    });

    test("in a transaction of one's own: `wait` and `signal` end it too", async () => {
      const name = named();
      const hf = holdfast(fromPg(pool), { wait: 300 });
      const patient = holdfast(fromPg(pool), { wait: 60_000 });
      await queue(hf, name).counts();
      await queue(patient, name).counts();
      const end = await holding((other, tx) => hold(other, name, tx));
      expect(await errorOf(hf.transaction<unknown>(() => call(hf, name)))).toMatchObject({
        code: "HF_LOCK_TIMEOUT",
      });
      const abort = new AbortController();
      const unwanted = errorOf(patient.transaction<unknown>(() => call(patient, name, abort.signal)));
      await eventually(async () => (await waiting()) > 0);
      abort.abort(new Error("no more"));
      expect(await unwanted).toMatchObject({ message: "no more" });
      expect(await waiting()).toBe(0);
      await end();
      expect(await applied(hf, name)).toBe(0);
      await hf.close();
      await patient.close();
    });
  },
);

test("a subject that somebody holds keeps nobody from another one", async () => {
  const name = named();
  const hf = holdfast(fromPg(pool), { wait: 60_000 });
  const q = quota(hf, { name, limit: 100 });
  const end = await holding((other, tx) =>
    quota(other as never, { name, limit: 100 }).consume("held", 1, { tx }),
  );
  const held = [q.consume("held"), q.consume("held"), q.consume("held")];
  await eventually(async () => (await waiting()) > 0);
  for (let i = 0; i < 5; i++) expect(await q.consume("free")).toMatchObject({ used: i + 1 });
  await end();
  await Promise.all(held);
  expect(await q.peek("held")).toMatchObject({ used: 4 });
  await hf.close();
});

test("calls that were sent together with one that has to wait do not wait", async () => {
  const name = named();
  const hf = holdfast(fromPg(pool), { wait: 60_000 });
  const q = quota(hf, { name, limit: 100 });
  for (const each of ["held", "a", "b"]) await q.consume(each);
  const end = await holding((other, tx) =>
    quota(other as never, { name, limit: 100 }).consume("held", 1, { tx }),
  );
  // What comes while this is under way goes together.
  const first = q.consume("a");
  const held = q.consume("held");
  await Promise.all([first, ...["a", "b", "new"].map((each) => q.consume(each))]);
  await end();
  await held;
  for (const [subject, used] of Object.entries({ held: 3, a: 3, b: 2, new: 1 }))
    expect(await q.peek(subject)).toMatchObject({ used });
  await hf.close();
});

test("the caller's own patience in a transaction is as it was", async () => {
  const hf = holdfast(fromPg(pool));
  const name = named();
  await hf.transaction(async (tx) => {
    await tx.client.query("SET LOCAL lock_timeout = '1234ms'");
    await quota(hf, { name, limit: 9 }).consume("ada");
    await quota(hf, { name, limit: 9 }).grant("ada", 1);
    await shop(hf, name).apply([{ sku: "a", quantity: 1 }]);
    await shop(hf, name).apply([
      { sku: "a", quantity: 1 },
      { sku: "b", quantity: 1 },
    ]);
    await shop(hf, name).reserve([{ sku: "a", quantity: 1 }], { id: "r" });
    await shop(hf, name).commit("r");
    await shop(hf, name).setMinimum("a", 0);
    await queue(hf, name).enqueue(1);
    const { rows } = await tx.client.query<{ lock_timeout: string }>("SHOW lock_timeout");
    expect(rows[0]?.lock_timeout).toBe("1234ms");
  });
  await hf.close();
});

describe("an answer that is lost, and a server that is gone", () => {
  const unknown = {
    "quota.consume": (hf: object, name: string, id?: string) =>
      quota(hf as never, { name, limit: 100 }).consume("ada", 1, id === undefined ? {} : { id }),
    "quota.grant": (hf: object, name: string, id?: string) =>
      quota(hf as never, { name, limit: 100 }).grant("ada", 1, id === undefined ? {} : { id }),
    "stock.increase": (hf: object, name: string, externalId?: string) =>
      shop(hf, name).increase("cap", 1, externalId === undefined ? {} : { externalId }),
  };

  test.each(Object.entries(unknown))(
    "%s says that it is not known, and by which id to repeat it",
    async (_, call) => {
      const proxy = await startProxy({ port: Number(new URL(database.url).port) });
      const near = new Pool({ connectionString: proxy.url(database.url), max: 4 });
      near.on("error", () => {});
      const hf = holdfast(fromPg(near));
      const name = named();
      try {
        await hf.capabilities();
        let times = 0;
        proxy.cutWhen((direction, chunk) => {
          if (direction === "to-client" || !chunk.includes(name)) return "pass";
          return ++times === 1 ? "drop-answer" : "cut-before";
        });
        const error = await errorOf(call(hf, name));
        expect(error).toBeInstanceOf(OutcomeUnknownError);
        expect(error).toMatchObject({ code: "HF_OUTCOME_UNKNOWN", retryable: false });
        proxy.cutWhen(undefined);
        const { id } = error as OutcomeUnknownError;
        expect(id).toEqual(expect.any(String));
        await call(hf, name, id);
        if (call === unknown["stock.increase"]) expect((await shop(hf, name).level("cap")).onHand).toBe(1);
        else {
          const { used: n, credit } = await quota(hf, { name, limit: 100 }).peek("ada");
          expect(n + credit).toBe(1);
        }
      } finally {
        await hf.close();
        await near.end();
        await proxy.close();
      }
    },
  );

  test("what was never sent was not applied: a connection that cannot be had", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const near = new Pool({ connectionString: proxy.url(database.url), max: 4 });
    near.on("error", () => {});
    const hf = holdfast(fromPg(near));
    await hf.capabilities();
    await proxy.close();
    // A call on a connection that is dead already may have been sent, as far as anybody knows.
    await eventually(() => near.totalCount === 0);
    const name = named();
    const many = await Promise.all([
      ...Array.from({ length: 300 }, (_, i) => errorOf(quota(hf, { name, limit: 9 }).consume(`s${i}`))),
      errorOf(shop(hf, name).increase("cap", 1)),
      errorOf(queue(hf, name).enqueue(1)),
      errorOf(quota(hf, { name, limit: 9 }).peek("ada")),
    ]);
    for (const error of many) {
      expect(error).toBeInstanceOf(HoldfastError);
      expect(error).toMatchObject({ code: "HF_CONNECTION_LOST", retryable: true });
    }
    await hf.close();
    await near.end();
  });

  test("a batch that is lost again and again is not sent as hundreds at once", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const near = new Pool({ connectionString: proxy.url(database.url), max: 50 });
    near.on("error", () => {});
    const hf = holdfast(fromPg(near), { wait: 1000 });
    const name = named();
    const q = quota(hf, { name, limit: 9 });
    try {
      await q.consume("first");
      let most = 0;
      proxy.cutWhen((direction, chunk) => {
        if (direction === "to-client" || !chunk.includes(name)) return "pass";
        most = Math.max(most, proxy.connections);
        return "cut-before";
      });
      const errors = await Promise.all(Array.from({ length: 256 }, (_, i) => errorOf(q.consume(`s${i}`))));
      for (const error of errors) expect(error).toMatchObject({ code: "HF_OUTCOME_UNKNOWN" });
      expect(most).toBeLessThanOrEqual(8);
    } finally {
      await hf.close();
      await near.end();
      await proxy.close();
    }
  });

  test("a queue that may have got a job says so, and does not add it twice", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const near = new Pool({ connectionString: proxy.url(database.url), max: 4 });
    near.on("error", () => {});
    const hf = holdfast(fromPg(near));
    const name = named();
    const jobs = queue(hf, name);
    try {
      await jobs.counts();
      let times = 0;
      proxy.cutWhen((direction, chunk) => {
        if (direction === "to-client" || !chunk.includes("queue_add")) return "pass";
        return ++times === 1 ? "drop-answer" : "pass";
      });
      expect(await errorOf(jobs.enqueue("once"))).toMatchObject({
        code: "HF_OUTCOME_UNKNOWN",
        retryable: false,
      });
      expect(await jobs.counts()).toMatchObject({ waiting: 1 });
    } finally {
      await hf.close();
      await near.end();
      await proxy.close();
    }
  });
});
