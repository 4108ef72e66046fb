/** Effects that happen once, whatever processes do; and what is particular to how they are recorded. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { PGlite } from "@electric-sql/pglite";
import { type Holdfast, SchemaMissingError, UsageError, holdfast, once, sql } from "holdfast";
import { fromPglite } from "holdfast/pglite";
import { type ConformanceSite, execute } from "holdfast/testing";
import { describe, expect, inject, test, type TestContext } from "vitest";
import { type Backend, backendNamed } from "./backends.ts";
import { type Place, missing, placeFor } from "./harness/places.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { ApplyArg, ApplyResult } from "./workers/once-apply.ts";

const worker = new URL("./workers/once-apply.ts", import.meta.url);
const seed = inject("seed");
const never = async () => expect.unreachable("entered");

interface Scene {
  readonly place: Place;
  readonly site: ConformanceSite;
  readonly hf: Holdfast<unknown>;
}

async function scene<T>(
  skip: TestContext["skip"],
  backend: Backend,
  run: (scene: Scene) => Promise<T>,
  migrate = true,
): Promise<T> {
  skip(missing(backend) !== undefined, missing(backend));
  const place = await placeFor(backend);
  const site = await backend.open(place.url);
  try {
    const hf = holdfast(site.database);
    if (migrate) await hf.migrate();
    return await run({ place, site, hf });
  } finally {
    await site.close();
    await place.drop();
  }
}

interface Crew {
  readonly form: ApplyArg["form"];
  readonly processes: number;
  readonly ids: number;
  readonly callers: number;
  /** How often each of the processes is killed while a body runs, and started again. */
  readonly kills: number;
}

/** What the processes were told, and what is in the database in the end. */
async function send(backend: Backend, { place, site, hf }: Scene, { processes, kills, ...rest }: Crew) {
  await execute(
    site,
    sql`CREATE TABLE effect (id varchar(40) NOT NULL, part integer NOT NULL, answer varchar(40) NOT NULL)`,
  );
  // No key, no unique index: nothing but the code under test keeps a second one out.
  await execute(site, sql`CREATE TABLE handled (id varchar(40) NOT NULL, answer varchar(40) NOT NULL)`);
  let killed = 0;
  let ready = 0;
  const all = Promise.withResolvers<void>();
  const one = async (index: number): Promise<ApplyResult> => {
    for (let life = 0; ; life++) {
      const arg: ApplyArg = {
        backend: backend.name,
        url: place.url,
        seed: seed + index * 1000 + life,
        ...rest,
      };
      const process = startWorker<ApplyResult>(worker, arg);
      try {
        await process.message("ready");
        // Processes take a second to start: without a common start the first would be done before the last has begun.
        if (life === 0 && ++ready === processes) all.resolve();
        await all.promise;
        process.send("go");
        if (life >= kills) return await process.result;
        // One that finds everything done has no body to be killed in.
        const state = await Promise.race([
          process.message("inside").then(() => "inside" as const),
          process.result.then(() => "done" as const),
        ]);
        if (state === "done") return await process.result;
        // Sometimes at once, sometimes late enough to hit the record or COMMIT.
        if (rest.form === "once") await new Promise((resolve) => setTimeout(resolve, (life * 7 + index) % 9));
      } finally {
        process.sigkill();
        if ((await process.exited).signal === "SIGKILL" && life < kills) killed++;
      }
    }
  };
  const answers = await Promise.all(Array.from({ length: processes }, (_, i) => one(i)));
  const rows = await hf.transaction((tx) =>
    tx.query<{ id: string; part: number; answer: string }>(sql`SELECT id, part, answer FROM effect`),
  );
  const expected = new Map(rows.map(({ id, answer }) => [id, answer]));
  return {
    killed,
    effects: rows.length,
    handled: expected.size,
    /** Answers that are not what the effect in the database says. */
    wrong: answers.flatMap(Object.entries).filter(([id, answer]) => expected.get(id) !== answer).length,
    answers: answers.reduce((sum, answer) => sum + Object.keys(answer).length, 0),
  };
}

// One of each kind: the cases of the conformance suite run on all of them.
const shared = [
  "pg",
  "pg through PgBouncer",
  "pg without advisory locks",
  "postgres.js",
  "Prisma",
  "mysql2 on MySQL",
  "mariadb on MariaDB",
  "better-sqlite3",
].map(backendNamed);

const long = process.env["HOLDFAST_LONG"] === "1";
const ids = long ? 200 : 25;
const processes = long ? 8 : 4;

describe(`${processes} processes send the same ${ids} messages, each in an order of its own (seed ${seed})`, () => {
  const crew = { processes, ids, callers: 3, kills: 0 };
  const exact = { killed: 0, effects: 2 * ids, handled: ids, wrong: 0, answers: processes * ids };

  test.for(shared)("each is handled once through $name", { timeout: 300_000 }, (backend, { skip }) =>
    scene(skip, backend, async (ground) => {
      expect(await send(backend, ground, { ...crew, form: "once" })).toEqual(exact);
    }),
  );

  // The same test must show the bug of what people write, or it would prove nothing.
  test("some are handled twice by code that looks, then writes", ({ skip }) =>
    scene(skip, backendNamed("pg"), async (ground) => {
      const { effects, wrong } = await send(backendNamed("pg"), ground, {
        ...crew,
        form: "look, then write",
      });
      expect(effects).toBeGreaterThan(2 * ids);
      expect(wrong).toBeGreaterThan(0);
    }));
});

describe(`processes are killed while they are at it, and started again (seed ${seed})`, () => {
  const names = ["pg", "pg through PgBouncer"].map(backendNamed);

  test.for(names)("each message is handled once through $name", { timeout: 300_000 }, (backend, { skip }) =>
    scene(skip, backend, async (ground) => {
      const crew = { processes: 8, ids: 50, callers: 2, kills: 2, form: "once" } as const;
      const { killed, ...rest } = await send(backend, ground, crew);
      expect(rest).toEqual({ effects: 100, handled: 50, wrong: 0, answers: 400 });
      expect(killed).toBeGreaterThan(0);
    }),
  );

  test("some are handled twice by code that records them in a transaction of its own", ({ skip }) =>
    scene(skip, backendNamed("pg"), async (ground) => {
      const crew = { processes: 1, ids: 10, callers: 1, kills: 3, form: "record later" } as const;
      const { killed, effects } = await send(backendNamed("pg"), ground, crew);
      expect(killed).toBe(3);
      expect(effects).toBeGreaterThan(20);
    }));
});

describe("the record", () => {
  const pg = backendNamed("pg");
  const records = (hf: Holdfast<unknown>) =>
    hf.transaction((tx) =>
      tx.query<{ id: string; seconds: number }>(
        sql`SELECT id, extract(epoch FROM until - at)::float8 AS seconds FROM holdfast.once ORDER BY id`,
      ),
    );

  test("is kept for as long as was said, by the server's clock", ({ skip }) =>
    scene(skip, pg, async ({ hf }) => {
      await once(hf, "a", async () => 1);
      await once(hf, "b", async () => 1, { keepFor: 90_000 });
      const week = 7 * 24 * 3600;
      expect(await records(hf)).toEqual([
        { id: `["a"]`, seconds: week },
        { id: `["b"]`, seconds: 90 },
      ]);
      // Nothing in this process remembers it: only what the row says counts.
      await hf.transaction((tx) =>
        tx.query(sql`UPDATE holdfast.once SET until = now() + interval '1 minute'`),
      );
      expect((await once(hf, "a", never)).replayed).toBe(true);
      await hf.transaction((tx) => tx.query(sql`UPDATE holdfast.once SET until = now() - interval '1 ms'`));
      expect(await once(hf, "a", async () => 2)).toEqual({ status: "done", value: 2, replayed: false });
      expect((await once(hf, "a", never)).value).toBe(2);
    }));

  test("outlives a message whose maker's clock is ahead: gone, the message is too old", ({ skip }) =>
    scene(skip, pg, async ({ hf }) => {
      const issuedAt = new Date(Date.now() + 3_600_000);
      await once(hf, "ahead", async () => 1, { issuedAt, keepFor: 60_000 });
      const [row] = await records(hf);
      expect(Math.round((row?.seconds ?? 0) / 60)).toBe(61);
    }));

  test("makes room when it has long run out, a few at a time, and waits for nobody", ({ skip }) =>
    scene(skip, pg, async ({ hf, site }) => {
      await hf.transaction((tx) =>
        tx.query(
          sql`INSERT INTO holdfast.once SELECT 'old' || i, '', '', now() - interval '1 day', now() - interval '1 day' + i * interval '1 s' FROM generate_series(1, 100) i`,
        ),
      );
      await hf.transaction((tx) =>
        tx.query(
          sql`INSERT INTO holdfast.once SELECT 'late' || i, '', '', now() - interval '1 day', now() - interval '1 minute' FROM generate_series(1, 5) i`,
        ),
      );
      const left = async (like: string) => (await records(hf)).filter(({ id }) => id.startsWith(like)).length;
      await hf.transaction(async (tx) => {
        // Somebody has the first one of them.
        await tx.query(sql`SELECT 1 AS one FROM holdfast.once WHERE id = 'old1' FOR UPDATE`);
        const other = holdfast(site.database);
        for (let i = 0; i < 8; i++) await once(other, ["other", i], async () => 1);
      });
      expect(await left("old")).toBe(60);
      expect((await records(hf)).map(({ id }) => id)).toContain("old1");
      for (let i = 0; i < 16; i++) await once(hf, ["new", i], async () => 1);
      // Those that ran out a minute ago are there still, for clocks that go back.
      expect([await left("old"), await left("late"), await left("[")]).toEqual([0, 5, 24]);
    }));

  test("is readable, and hashed if it is long", ({ skip }) =>
    scene(skip, pg, async ({ hf }) => {
      await once(hf, ["stripe", "evt_1", 42], async () => 1);
      await once(hf, "x".repeat(5000), async () => 1);
      expect((await records(hf)).map(({ id }) => id)).toEqual([
        `["stripe","evt_1","42"]`,
        expect.stringMatching(/^sha256:[0-9a-f]{64}$/),
      ]);
    }));

  test.for(["pg", "postgres.js", "Prisma"].map(backendNamed))("needs its table: $name", (backend, { skip }) =>
    scene(
      skip,
      backend,
      async ({ hf }) => {
        const error: unknown = await once(hf, "a", never).catch((e: unknown) => e);
        expect(error).toBeInstanceOf(SchemaMissingError);
        expect(error).toMatchObject({
          message: expect.stringContaining("The table holdfast.once is not in"),
        });
        await hf.migrate();
        expect((await once(hf, "a", async () => 1)).replayed).toBe(false);
      },
      false,
    ),
  );
});

describe("transactions in which a record could be missed", () => {
  const levels = ["repeatable read", "serializable"] as const;

  test.for(["pg", "Prisma"].map(backendNamed))("are refused through $name", (backend, { skip }) =>
    scene(skip, backend, async ({ hf, site }) => {
      for (const isolation of levels) {
        await expect(
          hf.transaction({ isolation }, (tx) => once(hf, "a", never, { tx })),
        ).rejects.toBeInstanceOf(UsageError);
        await expect(
          site.ownTransaction(async (native) => {
            const tx = hf.join(native);
            await tx.query(sql.raw(`SET TRANSACTION ISOLATION LEVEL ${isolation}`));
            return once(hf, "a", never, { tx });
          }),
        ).rejects.toMatchObject({ code: "HF_ISOLATION" });
      }
      // The instance's own default does not count.
      const strict = holdfast(site.database, { isolation: "serializable" });
      await once(strict, "a", async (tx) => {
        expect(await tx.query(sql`SELECT current_setting('transaction_isolation') AS level`)).toEqual([
          { level: "read committed" },
        ]);
      });
    }),
  );
});

test("the first call of an instance does not wait for the one connection there is", async () => {
  await using client = await PGlite.create();
  const hf = holdfast(fromPglite(client));
  await hf.migrate();
  const fresh = holdfast(fromPglite(client));
  await once(hf, "a", async () => {
    expect(await once(fresh, "a", never, { wait: "skip" })).toEqual({ status: "in progress" });
  });
});

test.for(["pg", "Prisma"].map(backendNamed))(
  "a call inside a transaction is told that another is in progress, and the transaction goes on: $name",
  (backend, { skip }) =>
    scene(skip, backend, async ({ hf }) => {
      const [inside, done] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
      const first = once(hf, "a", async () => {
        inside.resolve();
        await done.promise;
        return 1;
      });
      await inside.promise;
      await hf.transaction(async (tx) => {
        expect(await once(hf, "a", never, { tx, wait: "skip" })).toEqual({ status: "in progress" });
        expect(await once(hf, "a", never, { wait: "skip" })).toEqual({ status: "in progress" });
        const busy = once(hf, "a", never, { tx, wait: "nowait" });
        await expect(busy).rejects.toMatchObject({
          code: "HF_LOCK_NOT_AVAILABLE",
          keys: ["holdfast-once:a"],
        });
        done.resolve();
        expect(await once(hf, "a", never, { tx })).toEqual({ status: "done", value: 1, replayed: true });
      });
      expect((await first).replayed).toBe(false);
    }),
);

test("a replay is told, under the name that may be seen", ({ skip }) =>
  scene(skip, backendNamed("pg"), async ({ site }) => {
    const hf = holdfast(site.database, { names: (name) => name.replace(/:user-.*/, ":…") });
    const seen: unknown[] = [];
    const listener = (message: unknown) => void seen.push(message);
    subscribe("holdfast:once:replayed", listener);
    try {
      await once(hf, ["mail", "user-7"], async () => 1, { payload: 1 });
      expect(seen).toEqual([]);
      await once(hf, ["mail", "user-7"], never, { payload: 1 });
      expect(seen).toEqual([{ id: "mail:…" }]);
      await expect(once(hf, ["mail", "user-7"], never, { payload: 2 })).rejects.toMatchObject({
        id: "mail:…",
      });
    } finally {
      unsubscribe("holdfast:once:replayed", listener);
    }
  }));

test("an abort ends the wait for another call, and the body of the own one", ({ skip }) =>
  scene(skip, backendNamed("pg"), async ({ hf }) => {
    const reason = new Error("enough");
    const abort = new AbortController();
    const inside = Promise.withResolvers<void>();
    const first = once(
      hf,
      "a",
      async (tx) => {
        inside.resolve();
        await new Promise((_, reject) =>
          tx.signal.addEventListener("abort", () => reject(tx.signal.reason as Error)),
        );
      },
      { signal: abort.signal },
    );
    await inside.promise;
    const second = new AbortController();
    const waiting = once(hf, "a", never, { wait: 60_000, signal: second.signal });
    await eventually(async () => {
      const [row] = await hf.transaction((tx) =>
        tx.query(sql`SELECT count(*)::int AS n FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`),
      );
      return row?.["n"] === 1;
    });
    second.abort(reason);
    await expect(waiting).rejects.toBe(reason);
    abort.abort(reason);
    await expect(first).rejects.toBe(reason);
    expect((await once(hf, "a", async () => 1)).replayed).toBe(false);
  }));
