/** A process in whose handlers and bodies everything is thrown that can be thrown. It has to live. */
import * as api from "@opentelemetry/api";
import { InMemorySpanExporter, SimpleSpanProcessor, TracerProvider } from "@opentelemetry/sdk-trace";
import { holdfast, key, leader, once, versioned } from "holdfast";
import { audited } from "holdfast/audit";
import { openTelemetry } from "holdfast/opentelemetry";
import { fromPg } from "holdfast/pg";
import { prometheus } from "holdfast/prometheus";
import { queue } from "holdfast/queue";
import { schedule } from "holdfast/schedule";
import { Pool } from "pg";
import { odd } from "../harness/odd-values.ts";
import { eventually } from "../harness/wait.ts";

export interface OddArg {
  url: string;
  /** Somebody listens to what is told. */
  told: boolean;
}

export interface OddResult {
  /** What was written down for each, by who wrote it. */
  texts: Record<"plain" | "transactional" | "completed" | "schedule" | "enqueue", string[]>;
  /** Who threw something else than was thrown to it, or kept some of its work. */
  replaced: string[];
  /** How many leaders told of it, by a warning and by `onError`. */
  leaders: { warned: number; told: number };
}

export default async function throwing({ url, told }: OddArg): Promise<OddResult> {
  const pool = new Pool({ connectionString: url, max: 20 });
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool), { wait: 60_000 });
  const warnings: string[] = [];
  process.removeAllListeners("warning");
  process.on("warning", ({ message }) => warnings.push(message));
  if (told) {
    prometheus();
    const processor = new SimpleSpanProcessor({ exporter: new InMemorySpanExporter() });
    api.trace.setGlobalTracerProvider(new TracerProvider({ spanProcessors: [processor] }));
    openTelemetry(api, { recordErrors: true });
  }
  const all = odd.map(({ make }) => make());
  const replaced: string[] = [];

  /** It has to throw the very same. */
  const passes = async (who: string, call: (thrown: unknown, i: number) => Promise<unknown>) => {
    for (const [i, thrown] of all.entries()) {
      const found = await call(thrown, i).then(
        () => undefined,
        (error: unknown) => ({ error }),
      );
      if (!found || !Object.is(found.error, thrown)) replaced.push(`${who}: ${odd[i]?.name}`);
    }
  };
  const insert = "INSERT INTO odd VALUES (1)";
  await passes("transaction", (thrown) =>
    hf.transaction(async (tx) => {
      await tx.client.query(insert);
      throw thrown;
    }),
  );
  await passes("a body that throws at once", (thrown) =>
    hf.transaction(() => {
      throw thrown;
    }),
  );
  await passes("savepoint", (thrown) =>
    hf.transaction((tx) =>
      tx.transaction(async (inner) => {
        await inner.client.query(insert);
        throw thrown;
      }),
    ),
  );
  await passes("lock", (thrown, i) => hf.lock(key("odd", i), () => Promise.reject(thrown)));
  await passes("tryLock", (thrown, i) => hf.tryLock(key("odd", i), () => Promise.reject(thrown)));
  await passes("serializable", (thrown, i) =>
    hf.transaction({ lock: key("odd", i), isolation: "serializable" }, async (tx) => {
      await tx.client.query(insert);
      throw thrown;
    }),
  );
  await passes("retry", (thrown) => hf.retry(() => Promise.reject(thrown)));
  for (const wait of [60_000, "skip"] as const)
    await passes(`once ${wait}`, (thrown, i) =>
      once(
        hf,
        ["odd", i],
        async (tx) => {
          await tx.client.query(insert);
          throw thrown;
        },
        { wait: wait as number },
      ),
    );
  await passes("versioned", (thrown) =>
    versioned(hf, "odd_version").update(1, () => {
      throw thrown;
    }),
  );
  await passes("audited", (thrown, i) =>
    audited(hf, { actor: "me", action: "odd", target: String(i) }, () => Promise.reject(thrown)),
  );
  const kept = await pool.query("SELECT count(*)::int AS n FROM odd");
  if (kept.rows[0].n !== 0) replaced.push(`${kept.rows[0].n} rows were kept`);

  const texts: OddResult["texts"] = {
    plain: [],
    transactional: [],
    completed: [],
    schedule: [],
    enqueue: [],
  };
  for (const how of ["plain", "transactional", "completed"] as const) {
    const jobs = queue<number>(hf, how, { retries: 0 });
    await jobs.enqueueMany(all.map((_, payload) => ({ payload })));
    const handler = (i: number) => {
      // At once, and later.
      if (i % 2 === 0) throw all[i];
      return Promise.reject(all[i]);
    };
    const worker =
      how === "transactional"
        ? jobs.work(({ payload }) => handler(payload), { transactional: true })
        : jobs.work(async (job) => {
            if (how === "completed")
              // Rolled back, so it has failed after all.
              await hf.transaction({}, async (tx) => {
                await job.complete(tx);
                await handler(job.payload);
              });
            else return handler(job.payload);
          });
    await eventually(async () => (await jobs.counts()).failed === all.length, { timeout: 60_000 });
    const failed = await jobs.failed({ limit: 1000 });
    for (const { payload, error } of failed) texts[how][payload as number] = error;
    await worker.stop();
  }

  const common = { every: 100, retries: 0, keep: 1000, catchUp: "all" } as const;
  let [ran, enqueued] = [0, 0];
  const scheduled = schedule(hf, "odd", common, () => {
    const i = ran++ % all.length;
    if (i % 2 === 0) throw all[i];
    return Promise.reject(all[i]);
  });
  await passes("runNow", async (_, i) => {
    ran = i;
    await scheduled.runNow();
  });
  ran = 0;
  await scheduled.start();
  const enqueuing = schedule(hf, "odd enqueue", {
    ...common,
    enqueue: () => Promise.reject(all[enqueued++ % all.length]),
  });
  await enqueuing.start();
  await eventually(() => ran >= all.length && enqueued >= all.length, { timeout: 60_000 });
  await scheduled.stop();
  await enqueuing.stop();
  for (const [which, what] of [
    ["schedule", scheduled],
    ["enqueue", enqueuing],
  ] as const)
    texts[which] = (await what.runs(1000))
      .filter(({ manual }) => !manual)
      .toReversed()
      .map(({ error, state }) => error ?? state)
      .slice(0, all.length);

  let heard = 0;
  const leaders = all.flatMap((thrown, i) => [
    leader(hf, `odd ${i}`, () => Promise.reject(thrown)),
    leader(hf, `odd ${i} told`, () => Promise.reject(thrown), {
      onError(error) {
        heard += Object.is(error, thrown) ? 1 : 0;
        throw thrown;
      },
    }),
  ]);
  const warned = () => new Set(warnings.filter((text) => /^The leader .* failed: /s.test(text))).size;
  await eventually(() => heard >= all.length && warned() >= all.length, { timeout: 60_000 });
  await Promise.all(leaders.map((each) => each.stop()));
  await hf.close();
  await pool.end();
  // A listener that throws is said to.
  replaced.push(...warnings.filter((text) => text.startsWith("Metrics of Holdfast")));
  return { texts, replaced, leaders: { warned: warned(), told: heard } };
}
