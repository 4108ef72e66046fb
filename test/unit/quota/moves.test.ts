/**
 * A move of a bucket, ended after each of its steps: as if who moves it had died there. Whatever is left, everybody finds one place
 * where it counts, and what was counted before.
 */
import { type Database, holdfast, sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, onTestFinished, test } from "vitest";
import type { SqlConnection } from "../../../packages/holdfast/src/seam/database.ts";
import { sql } from "../../../packages/holdfast/src/seam/sql.ts";
import { storeDialect } from "../../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { quotaStore } from "../../../packages/holdfast/src/engines/sql/quota/index.ts";
import type { BucketMove, MovingBucket, Quotas } from "../../../packages/holdfast/src/quota/store.ts";
import { type TestDatabase, createDatabase } from "../../harness/databases.ts";

const free = { waitMs: 5000, free: true };
const inside = { waitMs: 5000, free: false };

let places: TestDatabase[];
let pools: Pool[];
let fresh = 0;

beforeAll(async () => {
  places = await Promise.all([createDatabase("postgres"), createDatabase("postgres")]);
  pools = places.map(({ url }) => new Pool({ connectionString: url, max: 10 }));
  for (const pool of pools) await holdfast(fromPg(pool)).migrate();
});

afterAll(async () => {
  await Promise.all((pools ?? []).map((pool) => pool.end()));
  await Promise.all((places ?? []).map((place) => place.drop()));
});

type PgDatabase = ReturnType<typeof fromPg<Pool>>;

/** PostgreSQL's functions, or the generic store on the same tables. */
const stores = {
  functions: (database: PgDatabase) => database,
  "the generic store": (database: PgDatabase) => ({
    ...database,
    engine: { ...database.engine, quotas: quotaStore(storeDialect) },
  }),
} as const;

describe.each(Object.keys(stores) as (keyof typeof stores)[])("by %s", (store) => {
  const databases = () => pools.map((pool) => stores[store](fromPg(pool)));

  /** As a process of its own; everything is routed to the first database. */
  function another() {
    const made = sharded(databases() as readonly Database<unknown>[], () => 0);
    onTestFinished(() => made.close());
    return made;
  }

  async function connected(
    number: number,
  ): Promise<{ connection: SqlConnection; quotas: Quotas<SqlConnection> }> {
    const database = databases()[number] as PgDatabase;
    const pinned = await database.connect?.({ use: "session", locks: [], wait: 5000 });
    if (!pinned) throw new Error("no connection");
    onTestFinished(() => pinned.release());
    return {
      connection: pinned.connection,
      quotas: database.engine.quotas as Quotas<SqlConnection>,
    };
  }

  /** One who moves, step by step, from one to the other. */
  class Steps {
    readonly #bucket: { quota: string; subject: string };
    readonly #from: number;
    readonly #here: Awaited<ReturnType<typeof connected>>;
    readonly #there: Awaited<ReturnType<typeof connected>>;
    #moves: BucketMove[] = [];
    #moving: readonly MovingBucket[] = [];

    private constructor(
      quotaName: string,
      from: number,
      here: Awaited<ReturnType<typeof connected>>,
      there: Awaited<ReturnType<typeof connected>>,
    ) {
      this.#bucket = { quota: quotaName, subject: "u" };
      this.#from = from;
      this.#here = here;
      this.#there = there;
    }

    static async of(quotaName: string, from: number): Promise<Steps> {
      return new Steps(quotaName, from, await connected(from), await connected(1 - from));
    }

    async #sql(where: "here" | "there", text: string): Promise<void> {
      const { connection } = where === "here" ? this.#here : this.#there;
      await connection.query(sql.raw(text));
    }

    async number(): Promise<void> {
      const [move] =
        (await this.#here.quotas.moves.number(this.#here.connection, [this.#bucket], free)) ?? [];
      this.#moves = [{ ...this.#bucket, move: move as number }];
    }

    async read(): Promise<void> {
      await this.#sql("here", "BEGIN");
      this.#moving =
        (await this.#here.quotas.moves.read(this.#here.connection, this.#moves, inside)) ??
        expect.unreachable("not here");
    }

    async arrive(): Promise<boolean> {
      const [moving] = this.#moving as [MovingBucket];
      const { connection, quotas } = this.#there;
      await this.#sql("there", "BEGIN");
      const arrived = await quotas.moves.arrive(connection, moving, this.#from, inside);
      if (arrived) {
        const lines = await this.#here.quotas.moves.lines(this.#here.connection, this.#bucket, 0, inside);
        await quotas.moves.follow(connection, this.#bucket, lines, inside);
      }
      await this.#sql("there", arrived ? "COMMIT" : "ROLLBACK");
      return arrived;
    }

    async leave(): Promise<void> {
      const [moving] = this.#moving as [MovingBucket];
      await this.#here.quotas.moves.leave(this.#here.connection, moving, 1 - this.#from, inside);
      await this.#sql("here", "COMMIT");
    }

    async settle(): Promise<void> {
      await this.#there.quotas.moves.settle(this.#there.connection, this.#moves, free);
    }

    /** Its connection to the database that it moves from is gone. */
    async lost(): Promise<void> {
      await this.#sql("here", "ROLLBACK");
    }
  }

  const order = ["number", "read", "arrive", "leave", "settle"] as const;

  /** Everybody goes on, by any way, and nothing is counted twice or forgotten. */
  async function goesOn(name: string, used: number): Promise<void> {
    for (const one of [quota(another(), { name, limit: 100 }), quota(another(), { name, limit: 100 })]) {
      expect(await one.peek("u")).toMatchObject({ used });
      expect(await one.consume("u")).toMatchObject({ used: ++used });
      expect(await one.tryConsume("u", 101 - used)).toMatchObject({ granted: false, used });
      expect(await one.reconcile("u")).toMatchObject({ ok: true, entries: used });
    }
    const moving = another();
    for (const to of [1, 0]) {
      await moving.move("u", { to, quotas: [name] });
      expect(await quota(another(), { name, limit: 100 }).consume("u")).toMatchObject({ used: ++used });
    }
  }

  const setOut = async () => {
    const name = `${store} ${++fresh}`;
    const q = quota(another(), { name, limit: 100 });
    for (let i = 0; i < 3; i++) await q.consume("u");
    return name;
  };

  test.each(order)("ends after: %s", async (last) => {
    const name = await setOut();
    const steps = await Steps.of(name, 0);
    for (const step of order.slice(0, order.indexOf(last) + 1)) await steps[step]();
    if (order.indexOf(last) < order.indexOf("leave") && last !== "number") await steps.lost();
    await goesOn(name, 3);
  });

  test.each(order)("on the way back, routed to where it goes; ends after: %s", async (last) => {
    const name = await setOut();
    await another().move("u", { to: 1, quotas: [name] });
    const steps = await Steps.of(name, 1);
    for (const step of order.slice(0, order.indexOf(last) + 1)) await steps[step]();
    if (order.indexOf(last) < order.indexOf("leave") && last !== "number") await steps.lost();
    await goesOn(name, 3);
  });

  test("a copy of one who slept does not replace that of the next", async () => {
    const name = await setOut();
    const [slow, quick] = [await Steps.of(name, 0), await Steps.of(name, 0)];
    await slow.number();
    await slow.read();
    await slow.lost();
    await quota(another(), { name, limit: 100 }).consume("u");
    await quick.number();
    await quick.read();
    await quick.arrive();
    expect(await slow.arrive(), "before it is decided").toBe(false);
    await quick.leave();
    expect(await slow.arrive(), "before it is told").toBe(false);
    await quick.settle();
    expect(await slow.arrive(), "when it counts").toBe(false);
    await slow.settle();
    await goesOn(name, 4);
  });

  test("two who move at once: the second has to begin anew", async () => {
    const name = await setOut();
    const [one, two] = [await Steps.of(name, 0), await Steps.of(name, 0)];
    await one.number();
    await two.number();
    await expect(one.read()).rejects.toThrow("not here");
    await one.lost();
    await two.read();
    await two.arrive();
    await two.leave();
    await goesOn(name, 3);
  });
});
