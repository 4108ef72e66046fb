/** Prisma's own way: `prisma.$extends(holdfast())`. */
import { PrismaPg } from "@prisma/adapter-pg";
import {
  LockNotAvailableError,
  NotInTransactionError,
  UsageError,
  WrongConnectionError,
  holdfast as instance,
  isUniqueViolation,
  key,
} from "holdfast";
import { fromPrisma, holdfast } from "holdfast/prisma";
import { Client } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, expectTypeOf, test } from "vitest";
import { type Prisma, PrismaClient, type State } from "../generated/prisma/client.ts";
import { createDatabase } from "../harness/databases.ts";

type Database = Awaited<ReturnType<typeof createDatabase>>;

const order = "0b9a4a44-3f1c-4a51-9d6b-1f7d5f6e2a10";
const other = "0b9a4a44-3f1c-4a51-9d6b-1f7d5f6e2a11";

let database: Database;
let client: Client;
let second: Client;

function open(options: Parameters<typeof holdfast>[0] = {}) {
  const adapter = new PrismaPg({ connectionString: database.url, max: 5 });
  return new PrismaClient({ adapter }).$extends(holdfast(options));
}
let prisma: ReturnType<typeof open>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  [client, second] = [database.url, database.url].map(
    (connectionString) => new Client({ connectionString }),
  ) as [Client, Client];
  await Promise.all([client.connect(), second.connect()]);
  await client.query(`
    CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes integer NOT NULL);
    CREATE SCHEMA shop;
    CREATE TYPE shop.line_state AS ENUM ('open', 'packed', 'shipped');
    CREATE TABLE shop.product (id integer PRIMARY KEY, name text NOT NULL UNIQUE, stock integer NOT NULL);
    CREATE TABLE shop."order line" (
      order_id uuid NOT NULL, line_no integer NOT NULL, state shop.line_state NOT NULL DEFAULT 'open',
      qty integer NOT NULL, version bigint NOT NULL DEFAULT 0, price numeric NOT NULL DEFAULT 0,
      product_id integer REFERENCES shop.product, PRIMARY KEY (order_id, line_no));
    CREATE TABLE shop.shift (day date NOT NULL, part shop.line_state NOT NULL, who text NOT NULL, PRIMARY KEY (part, day));
  `);
  prisma = open();
});

afterAll(async () => {
  await prisma?.$disconnect();
  await Promise.all([client?.end(), second?.end()]);
  await database?.drop();
});

beforeEach(async () => {
  await client.query(`TRUNCATE shop."order line", shop.product, shop.shift, upload RESTART IDENTITY`);
  await client.query("INSERT INTO shop.product VALUES (1, 'pen', 10), (2, 'ink', 5)");
  await client.query(`INSERT INTO shop."order line" (order_id, line_no, qty, product_id, state)
    VALUES ('${order}', 2, 20, 2, 'open'), ('${order}', 1, 10, 1, 'open'), ('${order}', 3, 30, NULL, 'packed'), ('${other}', 1, 1, 1, 'open')`);
});

const many = "0b9a4a44-3f1c-4a51-9d6b-1f7d5f6e2a12";

/** An order of its own. The planner knows nothing of so many rows: it last looked when there were few. */
async function lines(count: number): Promise<void> {
  await client.query(`ANALYZE shop."order line"`);
  await client.query(
    `INSERT INTO shop."order line" (order_id, line_no, qty) SELECT '${many}', i, i FROM generate_series(1, ${count}) i`,
  );
}

/** Whether another session can lock the line at once. */
async function free(line: number, of = order): Promise<boolean> {
  const { rows } = await second.query(
    `SELECT 1 FROM shop."order line" WHERE order_id = $1 AND line_no = $2 FOR UPDATE SKIP LOCKED`,
    [of, line],
  );
  return rows.length === 1;
}

async function untilSomebodyWaits(): Promise<void> {
  const waiting =
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
  await expect.poll(async () => (await client.query(waiting)).rowCount, { timeout: 20_000 }).toBe(1);
}

describe("findManyForUpdate", () => {
  test("maps names, composite ids, enums and relations, and locks what it returns", async () => {
    const lines = await prisma.$exact({}, async (tx) => {
      const found = await tx.orderLine.findManyForUpdate({
        where: { orderId: order, state: "Open", product: { stock: { gt: 1 } } },
        include: { product: true },
        orderBy: { position: "desc" },
        lock: { mode: "update", wait: 1000 },
      });
      expect(await Promise.all([free(1), free(2), free(3), free(1, other)])).toEqual([
        false,
        false,
        true,
        true,
      ]);
      await expect(
        second.query(`SELECT 1 FROM shop."order line" WHERE line_no = 1 AND qty = 10 FOR UPDATE NOWAIT`),
      ).rejects.toMatchObject({ code: "55P03" });
      return found;
    });
    expectTypeOf(lines).branded.toEqualTypeOf<Prisma.OrderLineGetPayload<{ include: { product: true } }>[]>();
    expect(
      lines.map(({ position, state, quantity, version, product }) => [
        position,
        state,
        quantity,
        version,
        product?.name,
      ]),
    ).toEqual([
      [2, "Open", 20, 0n, "ink"],
      [1, "Open", 10, 0n, "pen"],
    ]);
    expect(await Promise.all([free(1), free(2)])).toEqual([true, true]);
  });

  test("is typed like findMany", async () => {
    const [picked] = await prisma.$exact({}, (tx) =>
      tx.orderLine.findManyForUpdate({
        select: {
          position: true,
          state: true,
          price: true,
          product: { select: { name: true, _count: true } },
        },
        take: 1,
      }),
    );
    type Picked = Prisma.OrderLineGetPayload<{
      select: { position: true; state: true; price: true; product: { select: { name: true; _count: true } } };
    }>;
    expectTypeOf(picked).branded.toEqualTypeOf<Picked | undefined>();
    expectTypeOf(picked?.state).branded.toEqualTypeOf<State | undefined>();
    const plain = await prisma.$exact({}, (tx) => tx.product.findManyForUpdate());
    expectTypeOf(plain).branded.toEqualTypeOf<Prisma.ProductGetPayload<object>[]>();
    const withLines = await prisma.$exact({}, (tx) =>
      tx.product.findManyForUpdate({
        include: { lines: { select: { quantity: true } }, _count: { select: { lines: true } } },
      }),
    );
    expectTypeOf(withLines[0]?.lines).branded.toEqualTypeOf<{ quantity: number }[] | undefined>();
    expectTypeOf(withLines[0]?._count).branded.toEqualTypeOf<{ lines: number } | undefined>();
    expect(withLines.find(({ id }) => id === 1)?._count).toEqual({ lines: 2 });
    const omitted = await prisma.$exact({}, (tx) => tx.product.findManyForUpdate({ omit: { stock: true } }));
    expectTypeOf(omitted[0]).branded.toEqualTypeOf<{ id: number; name: string } | undefined>();
    expect(omitted.find(({ id }) => id === 1)).toEqual({ id: 1, name: "pen" });
    // Compiled, never run.
    const wrong = () =>
      prisma.$exact({}, async (tx) => {
        // @ts-expect-error there is no such field
        await tx.product.findManyForUpdate({ where: { nmae: "pen" } });
        // @ts-expect-error nor such an argument
        await tx.product.findManyForUpdate({ were: { name: "pen" } });
        // @ts-expect-error nor such a mode
        await tx.product.findManyForUpdate({ lock: { mode: "upd" } });
        // @ts-expect-error a unique field is wanted
        await tx.product.findUniqueForUpdate({ where: { stock: 1 } });
      });
    expect(typeof wrong).toBe("function");
  });

  test("does not return what no longer matches, nor what was not locked", async () => {
    await second.query("BEGIN");
    await second.query(
      `UPDATE shop."order line" SET state = 'shipped' WHERE line_no = 1 AND order_id = '${order}'`,
    );
    const waiting = prisma.$exact({}, (tx) =>
      tx.orderLine.findManyForUpdate({ where: { orderId: order, state: "Open" }, lock: { wait: 20_000 } }),
    );
    await untilSomebodyWaits();
    // It matches now, but nobody has locked it.
    await client.query(`INSERT INTO shop."order line" (order_id, line_no, qty) VALUES ('${order}', 9, 1)`);
    await second.query("COMMIT");
    expect((await waiting).map(({ position }) => position)).toEqual([2]);
  });

  test("locks in the order of keys, whatever order is asked for", async () => {
    // One at a time the two would deadlock in a few of these rounds.
    for (let round = 0; round < 20; round++) {
      const run = (direction: "asc" | "desc") =>
        prisma.$exact({ retry: false }, (tx) =>
          tx.orderLine.findManyForUpdate({ where: { orderId: order }, orderBy: { position: direction } }),
        );
      const [up, down] = await Promise.all([run("asc"), run("desc")]);
      expect(up.map(({ position }) => position)).toEqual([1, 2, 3]);
      expect(down.map(({ position }) => position)).toEqual([3, 2, 1]);
    }
  });

  test("takes, skips, and waits as told", async () => {
    await second.query("BEGIN");
    await second.query(`SELECT 1 FROM shop."order line" WHERE line_no = 1 FOR UPDATE`);
    try {
      const lines = await prisma.$exact({}, (tx) =>
        tx.orderLine.findManyForUpdate({ where: { orderId: order }, lock: { wait: "skip" } }),
      );
      expect(new Set(lines.map(({ position }) => position))).toEqual(new Set([2, 3]));
      const nowait = prisma.$exact({}, (tx) =>
        tx.orderLine.findManyForUpdate({ where: { orderId: order }, lock: { wait: "nowait" } }),
      );
      await expect(nowait).rejects.toThrow(LockNotAvailableError);
      const one = await prisma.$exact({}, (tx) =>
        tx.orderLine.findManyForUpdate({
          where: { orderId: order },
          orderBy: { position: "asc" },
          skip: 1,
          take: 1,
        }),
      );
      expect(one.map(({ position }) => position)).toEqual([2]);
    } finally {
      await second.query("ROLLBACK");
    }
  });

  test("skip: passes over what others have locked, as often as it takes", async () => {
    await lines(200);
    const queued = {
      where: { orderId: many, state: "Open" },
      orderBy: { position: "asc" },
      lock: { wait: "skip" },
    } as const;
    await second.query("BEGIN");
    await second.query(
      `SELECT 1 FROM shop."order line" WHERE order_id = '${many}' AND line_no <= 150 FOR UPDATE`,
    );
    try {
      await prisma.$exact({}, async (tx) => {
        expect(await tx.orderLine.findFirstForUpdate(queued)).toMatchObject({ position: 151 });
        // What this transaction has locked itself is no obstacle.
        const some = await tx.orderLine.findManyForUpdate({ ...queued, take: 3, select: { position: true } });
        expect(some).toEqual([{ position: 151 }, { position: 152 }, { position: 153 }]);
        const last = await tx.orderLine.findManyForUpdate({ ...queued, take: -2 });
        expect(last.map(({ position }) => position)).toEqual([199, 200]);
        expect(await tx.orderLine.findFirstForUpdate({ ...queued, take: -1 })).toMatchObject({
          position: 200,
        });
        // No more than was asked for is locked: they can have this one, and have it from here on.
        expect(await free(154, many)).toBe(true);
        const all = await tx.orderLine.findManyForUpdate({ ...queued, take: 100 });
        expect(all).toHaveLength(49);
        const none = { ...queued, where: { ...queued.where, position: { lte: 150 } } };
        expect(await tx.orderLine.findFirstForUpdate(none)).toBeNull();
        expect(await tx.orderLine.findManyForUpdate({ ...none, take: 2 })).toEqual([]);
      });
    } finally {
      await second.query("ROLLBACK");
    }
  });

  test("skip: workers that come at the same time get one each", async () => {
    await lines(40);
    const everybody = Promise.withResolvers<void>();
    let arrived = 0;
    const worker = () =>
      prisma.$exact({ retry: false }, async (tx) => {
        const job = await tx.orderLine.findFirstForUpdate({
          where: { orderId: many, state: "Open" },
          orderBy: { position: "asc" },
          lock: { wait: "skip" },
        });
        if (++arrived === 4) everybody.resolve();
        await everybody.promise;
        return job?.position;
      });
    const jobs = await Promise.all([worker(), worker(), worker(), worker()]);
    expect(new Set(jobs)).toEqual(new Set([1, 2, 3, 4]));
  });

  test("many rows with an id of two columns, in their order, also without the id", async () => {
    await lines(20_003);
    const found = await prisma.$exact({ deadline: 300_000 }, (tx) =>
      tx.orderLine.findManyForUpdate({
        where: { orderId: many },
        orderBy: { position: "desc" },
        select: { quantity: true },
        lock: { wait: 120_000 },
      }),
    );
    expect(found).toHaveLength(20_003);
    expect([found[0], found.at(-1)]).toEqual([{ quantity: 20_003 }, { quantity: 1 }]);
  });

  test("finds an enum with names of its own in the key", async () => {
    await client.query(
      "INSERT INTO shop.shift VALUES ('2026-01-05', 'open', 'ada'), ('2026-01-05', 'packed', 'bob')",
    );
    const found = await prisma.$exact({}, async (tx) => {
      const shifts = await tx.shift.findManyForUpdate({ where: { part: "Packed" } });
      const { rows } = await second.query("SELECT who FROM shop.shift FOR UPDATE SKIP LOCKED");
      return { shifts, unlocked: rows };
    });
    expect(found.shifts).toMatchObject([{ part: "Packed", who: "bob" }]);
    expect(found.unlocked).toEqual([{ who: "ada" }]);
  });
});

describe("findUniqueForUpdate and findFirstForUpdate", () => {
  test("by an id of two columns, and by another unique field", async () => {
    await prisma.$exact({}, async (tx) => {
      const line = await tx.orderLine.findUniqueForUpdate({
        where: { orderId_position: { orderId: order, position: 2 } },
        include: { product: true },
      });
      expectTypeOf(line).branded.toEqualTypeOf<Prisma.OrderLineGetPayload<{
        include: { product: true };
      }> | null>();
      expect(line).toMatchObject({ quantity: 20, product: { name: "ink" } });
      expect(await free(2)).toBe(false);
      expect(
        await tx.product.findUniqueForUpdate({ where: { name: "pen" }, select: { stock: true } }),
      ).toEqual({ stock: 10 });
      expect(await tx.product.findUniqueForUpdate({ where: { id: 99 } })).toBeNull();
    });
  });

  test("the first one that still matches when it is locked", async () => {
    await second.query("BEGIN");
    await second.query(
      `UPDATE shop."order line" SET state = 'shipped' WHERE line_no = 1 AND order_id = '${order}'`,
    );
    const waiting = prisma.$exact({}, (tx) =>
      tx.orderLine.findFirstForUpdate({
        where: { orderId: order, state: "Open" },
        orderBy: { position: "asc" },
        lock: { wait: 20_000 },
      }),
    );
    await untilSomebodyWaits();
    await second.query("COMMIT");
    expect(await waiting).toMatchObject({ position: 2 });
    const none = await prisma.$exact({}, (tx) =>
      tx.orderLine.findFirstForUpdate({ where: { quantity: -1 } }),
    );
    expect(none).toBeNull();
  });

  test("a crowd that is faster again and again is waited for", async () => {
    await lines(20);
    const watcher = new Client({ connectionString: database.url });
    await watcher.connect();
    const waits = async () => {
      const waiting =
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
      await expect.poll(async () => (await watcher.query(waiting)).rowCount, { timeout: 20_000 }).toBe(1);
    };
    const take = async (by: Client, line: number) => {
      await by.query("BEGIN");
      await by.query(
        `UPDATE shop."order line" SET state = 'shipped' WHERE order_id = '${many}' AND line_no = ${line}`,
      );
    };
    try {
      await take(client, 1);
      const late = prisma.$exact({ retry: false, deadline: 120_000 }, (tx) =>
        tx.orderLine.findFirstForUpdate({
          where: { orderId: many, state: "Open" },
          orderBy: { position: "asc" },
          lock: { wait: 100_000 },
        }),
      );
      late.catch(() => {});
      // Each time that it could have the first one, that is taken, and somebody has the next.
      for (let line = 1; line <= 15; line++) {
        const [has, next] = line % 2 === 1 ? [client, second] : [second, client];
        await waits();
        if (line < 15) await take(next, line + 1);
        await has.query("COMMIT");
      }
      expect(await late).toMatchObject({ position: 16 });
    } finally {
      await client.query("ROLLBACK");
      await second.query("ROLLBACK");
      await watcher.end();
    }
  });
});

describe("transactions", () => {
  test("outside of one nothing is locked, and it says so", async () => {
    await expect(prisma.product.findManyForUpdate()).rejects.toThrow(NotInTransactionError);
    await expect(prisma.$lock(key("a"))).rejects.toThrow(/\$exact/);
  });

  test("in a $transaction of one's own", async () => {
    await prisma.$transaction(async (tx) => {
      await tx.$lock(key("upload", "ada"));
      await tx.product.findUniqueForUpdate({ where: { id: 1 } });
      const { rowCount } = await second.query(
        "SELECT 1 FROM shop.product WHERE id = 1 FOR UPDATE SKIP LOCKED",
      );
      expect(rowCount).toBe(0);
      const busy = prisma.$exact({ lock: key("upload", "ada"), wait: "nowait" }, async () => {});
      await expect(busy).rejects.toThrow(LockNotAvailableError);
    });
  });

  test("a deadlock is retried, and commits", async () => {
    const attempts: number[] = [];
    const barrier = Promise.withResolvers<void>();
    let arrived = 0;
    const transfer = (from: number, to: number) => {
      let tries = 0;
      return prisma.$exact({ retry: { attempts: 5 } }, async (tx) => {
        attempts.push(++tries);
        await tx.product.update({ where: { id: from }, data: { stock: { decrement: 1 } } });
        if (++arrived === 2) barrier.resolve();
        await barrier.promise;
        await tx.product.update({ where: { id: to }, data: { stock: { increment: 1 } } });
      });
    };
    await Promise.all([transfer(1, 2), transfer(2, 1)]);
    expect(attempts.toSorted((a, b) => a - b)).toEqual([1, 1, 2]);
    expect(await prisma.product.findMany({ orderBy: { id: "asc" }, select: { stock: true } })).toEqual([
      { stock: 10 },
      { stock: 5 },
    ]);
  });

  test("its own errors pass through", async () => {
    const doubled = prisma.$exact({}, (tx) => tx.product.create({ data: { id: 3, name: "pen", stock: 1 } }));
    const error = await doubled.catch((e: unknown) => e);
    expect(error).toMatchObject({ code: "P2002" });
    expect(isUniqueViolation(error)).toBe(true);
  });

  test("with other extensions, before and after", async () => {
    const adapter = new PrismaPg({ connectionString: database.url, max: 2 });
    const many = new PrismaClient({ adapter })
      .$extends({
        result: { product: { label: { needs: { name: true }, compute: ({ name }) => `<${name}>` } } },
      })
      .$extends(holdfast())
      .$extends({ model: { product: { twice: (n: number) => 2 * n } } });
    try {
      const [found] = await many.$exact({}, async (tx) => {
        expect(tx.product.twice(2)).toBe(4);
        return tx.product.findManyForUpdate({ where: { id: 1 } });
      });
      expectTypeOf(found?.label).branded.toEqualTypeOf<string | undefined>();
      expect(found).toMatchObject({ label: "<pen>", stock: 10 });
    } finally {
      await many.$disconnect();
    }
  });

  test("a model that the database has no key for is refused", async () => {
    await client.query("ALTER TABLE upload DROP CONSTRAINT upload_pkey");
    try {
      await prisma.upload.create({ data: { userId: "ada", bytes: 1 } });
      const fresh = open();
      await expect(fresh.$exact({}, (tx) => tx.upload.findManyForUpdate())).rejects.toThrow(UsageError);
      await fresh.$disconnect();
    } finally {
      await client.query("ALTER TABLE upload ADD PRIMARY KEY (id)");
    }
  });
});

describe("a statement through the outer client", () => {
  test("is reported with both places", async () => {
    const strict = open({ wrongConnection: "throw" });
    try {
      const wrong = strict.$exact({}, async () => strict.product.count());
      await expect(wrong).rejects.toThrow(WrongConnectionError);
      const { message } = (await wrong.catch((error: unknown) => error)) as Error;
      expect(message.match(/prisma\.test\.ts:\d+:\d+/g)).toHaveLength(2);
      await expect(strict.$exact({}, () => strict.$transaction(async () => 1))).rejects.toThrow(
        WrongConnectionError,
      );
      await expect(strict.$exact({}, () => strict.$queryRaw`SELECT 1`)).rejects.toThrow(WrongConnectionError);
      // The transaction's own are none, models, raw ones, savepoints and locks alike.
      const fine = strict.$exact({ lock: key("a") }, async (tx) => {
        expect(await strict.$outside(() => strict.product.count())).toBe(2);
        await tx.$queryRaw`SELECT 1`;
        await tx.product.findManyForUpdate();
        await tx.$transaction(async (inner) => inner.product.count());
        return tx.product.count();
      });
      expect(await fine).toBe(2);
    } finally {
      await strict.$disconnect();
    }
  });

  test("also with fromPrisma, and not where it is meant", async () => {
    const adapter = new PrismaPg({ connectionString: database.url, max: 2 });
    const plain = new PrismaClient({ adapter });
    const hf = instance(fromPrisma(plain), { wrongConnection: "throw" });
    try {
      await expect(hf.transaction(() => plain.product.count())).rejects.toThrow(WrongConnectionError);
      expect(await hf.transaction(() => hf.outside(() => plain.product.count()))).toBe(2);
      expect(await hf.transaction(({ client: tx }) => tx.product.count())).toBe(2);
    } finally {
      await hf.close();
      await plain.$disconnect();
    }
  });
});
