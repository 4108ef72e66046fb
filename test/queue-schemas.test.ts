/** Schemas that answer at once, and those that answer later: what a worker makes of them. */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { PayloadError, type StandardSchema, queue } from "holdfast/queue";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { z } from "zod";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

const missing = unavailable("postgres");
let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  if (missing !== undefined) return;
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 10 });
  hf = holdfast(fromPg(pool));
  await hf.migrate();
});
afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await database?.drop();
});
beforeEach(({ skip }) => skip(missing !== undefined, missing));

const later = <T>(value: T) => new Promise<T>((resolve) => setTimeout(resolve, 5, value));

/** As a library might write it. */
function schema<Output>(validate: (value: unknown) => unknown): StandardSchema<unknown, Output> {
  return { "~standard": { version: 1, vendor: "test", validate: validate as never } };
}

const doubled = (value: unknown) =>
  typeof value === "number" ? { value: value * 2 } : { issues: [{ message: "not a number" }] };

const schemas: [string, StandardSchema<unknown, number>][] = [
  ["at once", schema(doubled)],
  ["later", schema(async (value) => later(doubled(value)))],
  [
    "later, by what is no Promise",
    // oxlint-disable-next-line unicorn/no-thenable -- that is what is tried.
    schema((value) => ({ then: (resolve: (result: unknown) => void) => resolve(doubled(value)) })),
  ],
  [
    "later, by Zod",
    z
      .number()
      .refine(async () => later(true))
      .transform(async (n) => later(n * 2)),
  ],
];

let made = 0;

describe.each([false, true])("transactional: %s", (transactional) => {
  test.each(schemas)("a schema that answers %s", async (_, answering) => {
    const name = `schema ${++made}`;
    const q = queue(hf, name, { schema: answering, retries: 0 });
    await expect(q.enqueue("seven")).rejects.toThrow(PayloadError);
    await q.enqueueMany([1, 2, 3].map((payload) => ({ payload })));
    // As an older version may have enqueued it.
    await queue<unknown>(hf, name, { retries: 0 }).enqueue("seven");
    const seen: number[] = [];
    const worker = q.work(({ payload }: { payload: number }) => void seen.push(payload), {
      transactional: transactional as true,
      pollMs: 50,
    });
    await eventually(async () => {
      const { waiting, running, failed } = await q.counts();
      return waiting + running === 0 && failed === 1;
    });
    await worker.stop();
    expect(seen.toSorted((a, b) => a - b)).toEqual([2, 4, 6]);
    expect(await q.failed()).toMatchObject([
      { payload: "seven", error: expect.stringContaining("PayloadError") },
    ]);
  });

  test("a schema that rejects, or throws: the job has failed", async () => {
    let times = 0;
    const broken = schema<number>((value) => {
      // When it is enqueued it is well.
      if (++times <= 2) return { value };
      if (value === 1) throw new Error("it throws");
      return Promise.reject(new Error("it rejects"));
    });
    const q = queue(hf, `schema ${++made}`, { schema: broken, retries: 0 });
    await q.enqueueMany([{ payload: 1 }, { payload: 2 }]);
    const worker = q.work(() => {}, { transactional: transactional as true, pollMs: 50 });
    await eventually(async () => (await q.counts()).failed === 2);
    await worker.stop();
    expect((await q.failed()).map(({ error }) => error)).toEqual([
      expect.stringContaining("it throws"),
      expect.stringContaining("it rejects"),
    ]);
  });
});

test("with one that answers at once, handlers are called in the same breath", async () => {
  const order: string[] = [];
  const noting = schema<number>((value) => {
    order.push("schema");
    return { value };
  });
  const q = queue(hf, `schema ${++made}`, { schema: noting });
  await q.enqueueMany(Array.from({ length: 5 }, (_, payload) => ({ payload })));
  order.length = 0;
  const worker = q.work(() => void order.push("handler"));
  await eventually(() => order.length === 10);
  await worker.stop();
  // Had one of them been put off, the next schema would have been asked before.
  expect(order).toEqual(Array.from({ length: 5 }, () => ["schema", "handler"]).flat());
});

test("a worker that is stopped while a schema thinks lets the job run to its end", async () => {
  const [asked, answer] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  let enqueued = false;
  const slow = schema<number>(async (value) => {
    if (enqueued) {
      asked.resolve();
      await answer.promise;
    }
    return { value };
  });
  const q = queue(hf, `schema ${++made}`, { schema: slow });
  await q.enqueue(1);
  enqueued = true;
  let ran = 0;
  const worker = q.work(() => void ran++);
  await asked.promise;
  const stopping = worker.stop();
  answer.resolve();
  await stopping;
  expect(ran).toBe(1);
  expect(await q.counts()).toMatchObject({ waiting: 0, running: 0, failed: 0 });
});
