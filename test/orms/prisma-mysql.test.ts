/** What is special of Prisma on MySQL and MariaDB, and why SQLite is refused. */
import { readFileSync } from "node:fs";
import { basename } from "node:path";
import { PrismaBetterSqlite3 } from "@prisma/adapter-better-sqlite3";
import { PrismaMariaDb } from "@prisma/adapter-mariadb";
import {
  CommitUnknownError,
  ConnectionLostError,
  DeadlineExceededError,
  LockNotAvailableError,
  LockTimeoutError,
  NotInTransactionError,
  StaleVersionError,
  SerializationError,
  TransactionAbortedError,
  UnsupportedError,
  UsageError,
  WrongConnectionError,
  failureOf,
  holdfast as instance,
  isRetryable,
  isUniqueViolation,
  key,
} from "holdfast";
import { fromPrisma, holdfast } from "holdfast/prisma";
import { quota } from "holdfast/quota";
import { stock as shelfOf } from "holdfast/stock";
import { createPool } from "mariadb";
import { type Connection, type RowDataPacket, createConnection } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, expectTypeOf, test } from "vitest";
import { type Prisma, PrismaClient } from "../generated/prisma-mysql/client.ts";
import { PrismaClient as SqliteClient } from "../generated/prisma-sqlite/client.ts";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";
import { eventually } from "../harness/wait.ts";

const caught = (running: PromiseLike<unknown>): Promise<unknown> =>
  Promise.resolve(running).then(
    () => undefined,
    (error: unknown) => error,
  );

const order = "0b9a4a44-3f1c-4a51-9d6b-1f7d5f6e2a10";
const other = "0b9a4a44-3f1c-4a51-9d6b-1f7d5f6e2a11";

const tables = [
  "CREATE TABLE upload (id int AUTO_INCREMENT PRIMARY KEY, user_id varchar(100) NOT NULL, bytes int NOT NULL)",
  "CREATE TABLE product (id int PRIMARY KEY, name varchar(100) NOT NULL, stock int NOT NULL, UNIQUE KEY product_name_key (name))",
  `CREATE TABLE \`order line\` (order_id char(36) NOT NULL, line_no int NOT NULL,
    state enum('open', 'packed', 'shipped') NOT NULL DEFAULT 'open', qty int NOT NULL, version bigint NOT NULL DEFAULT 0,
    price decimal(20, 4) NOT NULL DEFAULT 0, product_id int, PRIMARY KEY (order_id, line_no),
    CONSTRAINT line_product FOREIGN KEY (product_id) REFERENCES product (id))`,
  "CREATE TABLE shift (day date NOT NULL, part enum('open', 'packed', 'shipped') NOT NULL, who varchar(100) NOT NULL, PRIMARY KEY (part, day))",
  `CREATE TABLE reading (at datetime(3) NOT NULL, sensor varbinary(8) NOT NULL, big bigint NOT NULL,
    value decimal(10, 2) NOT NULL, note varchar(100) NOT NULL, PRIMARY KEY (at, sensor, big, value))`,
];

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  /** Somebody else, who writes SQL by hand. */
  let second: Connection;

  const open = (options: Parameters<typeof holdfast>[0] = {}, url = database.url) =>
    new PrismaClient({ adapter: new PrismaMariaDb(url) }).$extends(holdfast(options));
  let prisma: ReturnType<typeof open>;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    second = await createConnection(database.url);
    for (const table of tables) await second.query(`${table} ENGINE=InnoDB`);
    prisma = open();
    const bare = new PrismaClient({ adapter: new PrismaMariaDb(database.url) });
    await instance(fromPrisma(bare)).migrate();
    await bare.$disconnect();
  });

  afterAll(async () => {
    if (why !== undefined) return;
    await prisma.$disconnect();
    await second.end();
    await database.drop();
  });

  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    for (const table of ["`order line`", "product", "shift", "reading", "upload"])
      await second.query(`DELETE FROM ${table}`);
    await second.query("INSERT INTO product VALUES (1, 'pen', 10), (2, 'ink', 5)");
    await second.query(`INSERT INTO \`order line\` (order_id, line_no, qty, product_id, state)
      VALUES ('${order}', 2, 20, 2, 'open'), ('${order}', 1, 10, 1, 'open'), ('${order}', 3, 30, NULL, 'packed'), ('${other}', 1, 1, 1, 'open')`);
  });

  /** What another session can lock at once. */
  const free = async (query: string): Promise<RowDataPacket[]> => {
    const [rows] = await second.query<RowDataPacket[]>(`${query} FOR UPDATE SKIP LOCKED`);
    return rows;
  };
  const isFree = async (line: number, of = order) =>
    (await free(`SELECT 1 FROM \`order line\` WHERE order_id = '${of}' AND line_no = ${line}`)).length === 1;

  const many = "0b9a4a44-3f1c-4a51-9d6b-1f7d5f6e2a12";
  /** An order of its own. */
  const lines = async (count: number) => {
    const rows = Array.from({ length: count }, (_, i) => `('${many}', ${i + 1}, ${i + 1})`).join();
    await second.query(`INSERT INTO \`order line\` (order_id, line_no, qty) VALUES ${rows}`);
  };

  const stock = async (id: number) => {
    const [rows] = await second.query<RowDataPacket[]>("SELECT stock FROM product WHERE id = ?", [id]);
    return rows[0]?.["stock"] as number | undefined;
  };

  /** Connections of the pool are as they were. */
  const autocommit = async (of: Pick<PrismaClient, "$queryRawUnsafe">) => {
    const asking = Array.from({ length: 3 }, () =>
      of.$queryRawUnsafe<{ a: bigint }[]>("SELECT @@autocommit AS a"),
    );
    return (await Promise.all(asking)).map(([row]) => Number(row?.a));
  };

  const connectionId = async (tx: Pick<PrismaClient, "$queryRawUnsafe">) => {
    const [row] = await tx.$queryRawUnsafe<{ id: bigint }[]>("SELECT CONNECTION_ID() AS id");
    return Number(row?.id);
  };

  describe("find…ForUpdate", () => {
    test("maps names, composite ids, enums and relations, and locks what it returns", async () => {
      const lines = await prisma.$exact({}, async (tx) => {
        const found = await tx.orderLine.findManyForUpdate({
          where: { orderId: order, state: "Open", product: { stock: { gt: 1 } } },
          include: { product: true },
          orderBy: { position: "desc" },
          lock: { mode: "update", wait: 1000 },
        });
        expect([await isFree(1), await isFree(2), await isFree(3), await isFree(1, other)]).toEqual([
          false,
          false,
          true,
          true,
        ]);
        const nowait = second.query(
          `SELECT 1 FROM \`order line\` WHERE order_id = '${order}' AND line_no = 1 FOR UPDATE NOWAIT`,
        );
        expect(await caught(nowait)).toMatchObject({ errno: server === "mysql" ? 3572 : 1205 });
        return found;
      });
      expectTypeOf(lines).branded.toEqualTypeOf<
        Prisma.OrderLineGetPayload<{ include: { product: true } }>[]
      >();
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
      expect([await isFree(1), await isFree(2)]).toEqual([true, true]);
    });

    test("an enum with names of its own, and a date, in the key", async () => {
      await second.query(
        "INSERT INTO shift VALUES ('2026-01-05', 'open', 'ada'), ('2026-01-05', 'packed', 'bob')",
      );
      const found = await prisma.$exact({}, async (tx) => {
        const shifts = await tx.shift.findManyForUpdate({ where: { part: "Packed" } });
        return { shifts, unlocked: await free("SELECT who FROM shift") };
      });
      expect(found.shifts).toMatchObject([{ part: "Packed", who: "bob" }]);
      expect(found.unlocked).toEqual([{ who: "ada" }]);
    });

    test("moments, bytes, big numbers and decimals in the key", async () => {
      await second.query(`INSERT INTO reading VALUES
        ('2026-01-05 23:30:00.125', 'a', 9007199254740993, 1.10, 'this'),
        ('2026-01-05 23:30:00.125', 'a', 9007199254740992, 1.10, 'that')`);
      const found = await prisma.$exact({}, async (tx) => {
        const readings = await tx.reading.findManyForUpdate({ where: { big: 9007199254740993n } });
        return { readings, unlocked: await free("SELECT note FROM reading") };
      });
      expect(found.readings).toMatchObject([{ note: "this", at: new Date("2026-01-05T23:30:00.125Z") }]);
      expect(found.unlocked).toEqual([{ note: "that" }]);
    });

    test("does not return what no longer matches", async () => {
      await second.query("START TRANSACTION");
      await second.query(
        `UPDATE \`order line\` SET state = 'shipped' WHERE line_no = 1 AND order_id = '${order}'`,
      );
      let looked = false;
      const waiting = prisma.$exact({}, async (tx) => {
        looked = true;
        return tx.orderLine.findManyForUpdate({
          where: { orderId: order, state: "Open" },
          lock: { wait: 20_000 },
        });
      });
      const first = prisma.$exact({}, (tx) =>
        tx.orderLine.findFirstForUpdate({
          where: { orderId: order, state: "Open" },
          orderBy: { position: "asc" },
          lock: { wait: 20_000 },
        }),
      );
      await eventually(() => looked);
      const who = new PrismaClient({ adapter: new PrismaMariaDb(database.url) });
      const hf = instance(fromPrisma(who));
      await eventually(async () => (await hf.inspect()).waiters.length === 2);
      await second.query("COMMIT");
      expect((await waiting).map(({ position }) => position)).toEqual([2]);
      expect(await first).toMatchObject({ position: 2 });
      await who.$disconnect();
    });

    test("takes, skips, and waits as told", async () => {
      const find = (wait: number | "skip" | "nowait") =>
        prisma.$exact({}, (tx) =>
          tx.orderLine.findManyForUpdate({
            where: { orderId: order },
            orderBy: { position: "asc" },
            lock: { wait },
          }),
        );
      await second.query("START TRANSACTION");
      await second.query(
        `SELECT 1 FROM \`order line\` WHERE order_id = '${order}' AND line_no = 1 FOR UPDATE`,
      );
      try {
        expect((await find("skip")).map(({ position }) => position)).toEqual([2, 3]);
        expect(await caught(find("nowait"))).toBeInstanceOf(LockNotAvailableError);
        expect(await caught(find(100))).toBeInstanceOf(LockTimeoutError);
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
      // Or the row after the last one would be locked too.
      await second.query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED");
      await second.query("START TRANSACTION");
      await second.query(
        `SELECT 1 FROM \`order line\` WHERE order_id = '${many}' AND line_no <= 150 FOR UPDATE`,
      );
      try {
        await prisma.$exact({}, async (tx) => {
          expect(await tx.orderLine.findFirstForUpdate(queued)).toMatchObject({ position: 151 });
          // What this transaction has locked itself is no obstacle.
          const some = await tx.orderLine.findManyForUpdate({
            ...queued,
            take: 3,
            select: { position: true },
          });
          expect(some).toEqual([{ position: 151 }, { position: 152 }, { position: 153 }]);
          const last = await tx.orderLine.findManyForUpdate({ ...queued, take: -2 });
          expect(last.map(({ position }) => position)).toEqual([199, 200]);
          expect(await tx.orderLine.findFirstForUpdate({ ...queued, take: -1 })).toMatchObject({
            position: 200,
          });
          // No more than was asked for is locked: they can have this one, and have it from here on.
          expect(await isFree(154, many)).toBe(true);
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
      await lines(5003);
      const found = await prisma.$exact({ deadline: 300_000 }, (tx) =>
        tx.orderLine.findManyForUpdate({
          where: { orderId: many },
          orderBy: { position: "desc" },
          select: { quantity: true },
          lock: { wait: 120_000 },
        }),
      );
      expect(found).toHaveLength(5003);
      expect([found[0], found.at(-1)]).toEqual([{ quantity: 5003 }, { quantity: 1 }]);
    });

    test("by an id of two columns, and by another unique field", async () => {
      await prisma.$exact({}, async (tx) => {
        const line = await tx.orderLine.findUniqueForUpdate({
          where: { orderId_position: { orderId: order, position: 2 } },
          include: { product: true },
        });
        expect(line).toMatchObject({ quantity: 20, product: { name: "ink" } });
        expect(await isFree(2)).toBe(false);
        expect(
          await tx.product.findUniqueForUpdate({ where: { name: "pen" }, select: { stock: true } }),
        ).toEqual({ stock: 10 });
        expect(await tx.product.findUniqueForUpdate({ where: { id: 99 } })).toBeNull();
      });
    });

    test("in another database than the connection's own", async () => {
      const url = new URL(database.url);
      url.pathname = "/mysql";
      const adapter = new PrismaMariaDb(url.href, { database: database.name });
      const elsewhere = new PrismaClient({ adapter }).$extends(holdfast());
      try {
        await elsewhere.$exact({}, async (tx) => {
          expect(await tx.product.findUniqueForUpdate({ where: { id: 1 } })).toMatchObject({ stock: 10 });
          expect(await free("SELECT id FROM product")).toEqual([{ id: 2 }]);
        });
      } finally {
        await elsewhere.$disconnect();
      }
    });

    test("never returns what a snapshot shows of a row that has changed since", async () => {
      const stale = (isolationLevel?: "RepeatableRead") =>
        prisma.$transaction(async (tx) => {
          await tx.product.count();
          await second.query("UPDATE product SET stock = stock + 1 WHERE id = 1");
          expect(await tx.product.findUniqueForUpdate({ where: { id: 2 } })).toMatchObject({ stock: 5 });
          return tx.product.findUniqueForUpdate({ where: { id: 1 } });
        }, isolationLevel && { isolationLevel });
      for (const level of [undefined, "RepeatableRead"] as const) {
        const error = await caught(stale(level));
        expect(error).toBeInstanceOf(SerializationError);
        expect(isRetryable(error)).toBe(true);
      }
      const fresh = await prisma.$transaction(
        async (tx) => {
          await tx.product.count();
          await second.query("UPDATE product SET stock = 77 WHERE id = 1");
          return tx.product.findUniqueForUpdate({ where: { id: 1 } });
        },
        { isolationLevel: "ReadCommitted" },
      );
      expect(fresh).toMatchObject({ stock: 77 });
    });
  });

  describe("updateVersioned", () => {
    const where = { orderId_position: { orderId: order, position: 1 } };

    test("of those who read the same version one writes; a function decides anew", async () => {
      const writing = Array.from({ length: 8 }, (_, i) =>
        prisma.orderLine.updateVersioned({ where: { ...where, version: 0n }, data: { quantity: i } }),
      );
      const results = await Promise.allSettled(writing);
      const written = results.flatMap((each) => (each.status === "fulfilled" ? [each.value] : []));
      expect(written).toMatchObject([{ version: 1n }]);
      for (const each of results)
        if (each.status === "rejected") expect(each.reason).toBeInstanceOf(StaleVersionError);
      const from = written[0]?.quantity ?? Number.NaN;
      const adding = Array.from({ length: 8 }, () =>
        prisma.orderLine.updateVersioned({
          where,
          data: ({ quantity }) => ({ quantity: quantity + 1 }),
          include: { product: true },
        }),
      );
      for (const each of await Promise.all(adding)) expect(each.product?.name).toBe("pen");
      expect(await prisma.orderLine.findUnique({ where })).toMatchObject({
        quantity: from + 8,
        version: 9n,
      });
    });

    test("under a snapshot, what has changed since is stale", async () => {
      const stale = prisma.$transaction(async (tx) => {
        await tx.orderLine.findUnique({ where });
        await second.query(`UPDATE \`order line\` SET qty = 99, version = 1 WHERE line_no = 1`);
        return tx.orderLine.updateVersioned({
          where,
          data: ({ quantity }) => ({ quantity: quantity + 1 }),
        });
      });
      await expect(stale).rejects.toBeInstanceOf(StaleVersionError);
      expect(await prisma.orderLine.findUnique({ where })).toMatchObject({ quantity: 99, version: 1n });
    });
  });

  test("docs/adapters/prisma.md names every table that Prisma Migrate is to leave alone", async () => {
    const page = readFileSync(new URL("../../docs/adapters/prisma.md", import.meta.url), "utf8");
    const named = [...page.matchAll(/^\s+"(holdfast_\w+)",$/gm)].map(([, name]) => name);
    const [rows] = await second.query<RowDataPacket[]>(
      "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND table_name LIKE 'holdfast%'",
    );
    expect(named).toEqual(rows.map(({ name }) => name as string).toSorted());
  });

  test("patterns take part in Prisma's own transactions", async () => {
    const uploads = quota(prisma.$holdfast, { name: "uploads", limit: 3 });
    const upload = () =>
      prisma.$transaction(
        async (tx) => {
          await uploads.consume("ada", 1, { tx });
          await tx.upload.create({ data: { userId: "ada", bytes: 1 } });
        },
        { isolationLevel: "ReadCommitted", maxWait: 60_000, timeout: 60_000 },
      );
    const results = await Promise.allSettled(Array.from({ length: 8 }, upload));
    expect(results.filter(({ status }) => status === "fulfilled")).toHaveLength(3);
    expect([await prisma.upload.count(), (await uploads.peek("ada")).used]).toEqual([3, 3]);
  });

  describe("transactions", () => {
    test("in a $transaction of one's own, and not after its end", async () => {
      await expect(prisma.$lock(key("a"))).rejects.toThrow(NotInTransactionError);
      let kept: Parameters<Parameters<typeof prisma.$transaction>[0]>[0] | undefined;
      await prisma.$transaction(async (tx) => {
        kept = tx as never;
        await tx.$lock(key("upload", "ada"));
        const busy = prisma.$exact({ lock: key("upload", "ada"), wait: "nowait" }, async () => {});
        await expect(busy).rejects.toThrow(LockNotAvailableError);
      });
      const late = (kept as unknown as typeof prisma).$lock(key("upload", "ada"));
      await expect(late).rejects.toThrow(NotInTransactionError);
    });

    test("a handle that outlives its transaction does not write to somebody else's", async () => {
      const bare = new PrismaClient({ adapter: new PrismaMariaDb(database.url) });
      const hf = instance(fromPrisma(bare));
      try {
        const joined = await bare.$transaction(async (tx) => hf.join(tx));
        await expect(joined.lock(key("late"))).rejects.toThrow(NotInTransactionError);
      } finally {
        await bare.$disconnect();
      }
    });

    test("Prisma's nested transaction is a part of the outer one", async () => {
      await prisma.$exact({}, async (tx) => {
        await tx.$transaction(async (inner) => {
          await inner.$lock(key("nested"));
          await inner.product.findUniqueForUpdate({ where: { id: 1 } });
        });
        expect(await free("SELECT 1 FROM product WHERE id = 1")).toEqual([]);
      });
    });

    test("a deadlock is retried, and commits", async () => {
      const attempts: number[] = [];
      let arrived = 0;
      const transfer = (from: number, to: number) => {
        let tries = 0;
        return prisma.$exact({ retry: { attempts: 5 } }, async (tx) => {
          attempts.push(++tries);
          await tx.product.update({ where: { id: from }, data: { stock: { decrement: 1 } } });
          arrived++;
          await eventually(() => arrived >= 2);
          await tx.product.update({ where: { id: to }, data: { stock: { increment: 1 } } });
        });
      };
      await Promise.all([transfer(1, 2), transfer(2, 1)]);
      expect(attempts.toSorted((a, b) => a - b)).toEqual([1, 1, 2]);
      expect([await stock(1), await stock(2)]).toEqual([10, 5]);
      expect(await autocommit(prisma)).toEqual([1, 1, 1]);
    });

    test("nothing is kept of a body that swallows a deadlock, and the call says so", async () => {
      let arrived = 0;
      const swallowing = (from: number, to: number) =>
        prisma.$exact({ retry: false }, async (tx) => {
          await tx.product.update({ where: { id: from }, data: { stock: 1 } });
          arrived++;
          await eventually(() => arrived === 2);
          const error = await caught(tx.product.update({ where: { id: to }, data: { stock: 1 } }));
          if (error) await tx.product.create({ data: { id: 3, name: "cap", stock: 3 } });
        });
      const ends = await Promise.all([caught(swallowing(1, 2)), caught(swallowing(2, 1))]);
      const failed = ends.filter((end) => end !== undefined);
      expect(failed).toHaveLength(1);
      expect(failed[0]).toBeInstanceOf(TransactionAbortedError);
      expect([await stock(1), await stock(2), await stock(3)]).toEqual([1, 1, undefined]);
      expect(await autocommit(prisma)).toEqual([1, 1, 1]);
    });

    test("a statement that fails and is caught leaves the rest of the transaction as it is", async () => {
      await prisma.$exact({}, async (tx) => {
        await caught(tx.product.create({ data: { id: 1, name: "cap", stock: 1 } }));
        await tx.product.update({ where: { id: 2 }, data: { stock: 6 } });
      });
      expect(await stock(2)).toBe(6);
    });

    test("its own errors pass through, and are known", async () => {
      const error = await caught(
        prisma.$exact({}, (tx) => tx.product.create({ data: { id: 3, name: "pen", stock: 1 } })),
      );
      expect(error).toMatchObject({ code: "P2002" });
      expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
      expect(failureOf(error)).toMatchObject({ kind: "unique", constraint: "product_name_key" });
      const raw = await caught(
        prisma.$exact({}, (tx) => tx.$executeRawUnsafe("INSERT INTO product VALUES (3, 'pen', 1)")),
      );
      expect(failureOf(raw)).toMatchObject({ kind: "unique", constraint: "product_name_key" });
      const foreign = await caught(
        prisma.$exact({}, (tx) =>
          tx.orderLine.create({ data: { orderId: other, position: 7, quantity: 1, productId: 99 } }),
        ),
      );
      expect(failureOf(foreign)).toMatchObject({ kind: "foreign-key", constraint: "line_product" });
    });

    test("isolation and access are what was asked for", async () => {
      const bare = new PrismaClient({ adapter: new PrismaMariaDb(database.url) });
      const hf = instance(fromPrisma(bare));
      try {
        const write = hf.transaction({ readOnly: true, isolation: "repeatable read" }, ({ client }) =>
          client.product.update({ where: { id: 1 }, data: { stock: 1 } }),
        );
        expect(failureOf(await caught(write))).toMatchObject({ kind: "read-only" });
        for (const [isolation, seen] of [
          ["read committed", 99],
          ["repeatable read", 10],
        ] as const) {
          await second.query("UPDATE product SET stock = 10 WHERE id = 1");
          const read = await hf.transaction({ isolation }, async ({ client: tx }) => {
            await tx.product.count();
            await second.query("UPDATE product SET stock = 99 WHERE id = 1");
            return tx.product.findUnique({ where: { id: 1 } });
          });
          expect(read?.stock).toBe(seen);
        }
      } finally {
        await bare.$disconnect();
      }
    });

    test("a connection that dies in the body", async () => {
      const once = open({ retry: false });
      try {
        const lost = once.$exact({}, async (tx) => {
          await second.query(`KILL CONNECTION ${await connectionId(tx)}`);
          await tx.product.update({ where: { id: 1 }, data: { stock: 1 } });
        });
        expect(await caught(lost)).toBeInstanceOf(ConnectionLostError);
        expect(await once.$exact({}, async () => "next")).toBe("next");
        expect(await stock(1)).toBe(10);
      } finally {
        await once.$disconnect();
      }
    });

    test("a COMMIT whose answer is lost is not known, and not run again", async () => {
      const proxy = await startProxy({ port: Number(new URL(database.url).port) });
      const proxied = open({}, proxy.url(database.url));
      try {
        let armed = false;
        proxy.cutWhen((direction, chunk) => {
          if (!armed || direction !== "to-server" || !/\bCOMMIT\b/i.test(chunk.toString("latin1")))
            return "pass";
          armed = false;
          return "drop-answer";
        });
        let runs = 0;
        const running = proxied.$exact({}, async (tx) => {
          runs++;
          await tx.product.update({ where: { id: 1 }, data: { stock: 1 } });
          armed = true;
        });
        await expect(running).rejects.toBeInstanceOf(CommitUnknownError);
        expect([runs, await stock(1)]).toEqual([1, 1]);
      } finally {
        await proxied.$disconnect();
        await proxy.close();
      }
    });

    test("a network that falls silent does not keep the error of the body to itself", async () => {
      const proxy = await startProxy({ port: Number(new URL(database.url).port) });
      const proxied = open({}, proxy.url(database.url));
      try {
        const mine = new Error("mine");
        let id = 0;
        const failing = proxied.$exact({}, async (tx) => {
          id = await connectionId(tx);
          proxy.freeze();
          throw mine;
        });
        expect(await caught(failing)).toBe(mine);
        proxy.thaw();
        expect(await proxied.$exact({}, async () => "next")).toBe("next");
        // `mariadb` ends the silent session by a KILL on a connection of its own, through the proxy too, and handles no
        // error of it: a proxy that closed now would end the process.
        await eventually(async () => {
          const [rows] = await second.query<RowDataPacket[]>(
            "SELECT id FROM information_schema.processlist WHERE id = ? OR info LIKE 'KILL %'",
            [id],
          );
          return rows.length === 0;
        });
      } finally {
        proxy.thaw();
        await proxied.$disconnect();
        await proxy.close();
      }
    });

    test("an abort ends the statement on the server", async () => {
      const stop = new AbortController();
      const reason = new Error("enough");
      let id = 0;
      const sleeping = prisma.$exact({ signal: stop.signal }, async (tx) => {
        id = await connectionId(tx);
        await tx.$queryRawUnsafe("SELECT SLEEP(60) FROM product");
      });
      const busy = async () => {
        const [rows] = await second.query<RowDataPacket[]>(
          "SELECT info FROM /*M! information_schema. *//*!80022 performance_schema. */ processlist WHERE id = ?",
          [id],
        );
        return /SLEEP/.test(String(rows[0]?.["info"] ?? rows[0]?.["INFO"]));
      };
      await eventually(async () => id > 0 && (await busy()));
      stop.abort(reason);
      expect(await caught(sleeping)).toBe(reason);
      expect(await busy()).toBe(false);
    });

    test("a pool that has no connection to give until the deadline", async () => {
      const url = new URL(database.url);
      url.searchParams.set("connectionLimit", "1");
      const one = open({ wrongConnection: "off" }, url.href);
      try {
        await one.$exact({}, async () => {
          const beside = one.$exact({ separate: true, deadline: 300 }, async () => {});
          expect(await caught(beside)).toBeInstanceOf(DeadlineExceededError);
        });
        expect(await one.$exact({}, async () => "next")).toBe("next");
      } finally {
        await one.$disconnect();
      }
    });
  });

  test("a statement beside its transaction is told of", async () => {
    const guard = open({ wrongConnection: "throw" });
    try {
      const error = await caught(guard.$exact({}, async () => void (await guard.product.count())));
      expect(error).toBeInstanceOf(WrongConnectionError);
      expect((error as Error).message.split(basename(import.meta.url))).toHaveLength(3);
      await guard.$exact({ lock: key("fine") }, (tx) => tx.product.count());
    } finally {
      await guard.$disconnect();
    }
  });

  test("with a pool of one's own, and the text protocol", async () => {
    const url = new URL(database.url);
    url.protocol = "mariadb:";
    const pool = createPool(url.href);
    // The adapter brings a release of its own of the package, whose types differ.
    const adapter = new PrismaMariaDb(pool as never, { useTextProtocol: true });
    const own = new PrismaClient({ adapter }).$extends(holdfast());
    try {
      await own.$exact({ lock: key("own pool") }, async (tx) => {
        await tx.product.update({ where: { id: 1 }, data: { stock: 3 } });
        expect(await stock(1)).toBe(10);
      });
      expect(await stock(1)).toBe(3);
      expect(await autocommit(own)).toEqual([1, 1, 1]);
      expect(pool.activeConnections()).toBe(0);
    } finally {
      await own.$disconnect();
      await pool.end();
    }
  });

  test("a client that was connected before is refused, and told what to do", async () => {
    const early = new PrismaClient({ adapter: new PrismaMariaDb(database.url) });
    try {
      await early.product.count();
      const hf = instance(fromPrisma(early));
      const error = await caught(hf.transaction(async () => {}));
      expect(error).toBeInstanceOf(UsageError);
      expect(String(error)).toMatch(/before the first statement/);
      // Connected again it is seen.
      await early.$disconnect();
      expect(await hf.transaction(({ client }) => client.product.count())).toBe(2);
    } finally {
      await early.$disconnect();
    }
  });

  test("ledger and movements are views, which `include` takes", async () => {
    for (const view of viewsOfThePage()) await second.query(view);
    await second.query("CREATE TABLE user (id varchar(100) PRIMARY KEY, name varchar(100) NOT NULL)");
    await second.query("CREATE TABLE article (sku varchar(100) PRIMARY KEY, name varchar(100) NOT NULL)");
    await second.query("INSERT INTO user VALUES ('u1', 'Ada'), ('u2', 'Bob')");
    await second.query("INSERT INTO article VALUES ('MUG', 'Mug')");
    const credits = quota(prisma.$holdfast, { name: "credits", limit: 0 });
    await credits.grant("u1", 10);
    await prisma.$transaction((tx) => credits.consume("u1", 4, { tx }));
    const users = await prisma.user.findMany({
      include: { credits: { orderBy: { version: "asc" } } },
      orderBy: { id: "asc" },
    });
    const shown = ({ kind, amount, credit }: { kind: string; amount: bigint; credit: bigint }) => [
      kind,
      amount,
      credit,
    ];
    expect(users.map(({ name, credits: entries }) => [name, entries.map(shown)])).toEqual([
      [
        "Ada",
        [
          ["grant", 10n, 10n],
          ["consume", 4n, 6n],
        ],
      ],
      ["Bob", []],
    ]);
    const [newest] = (await credits.history("u1", { limit: 1 })).entries;
    expect(Math.abs((users[0]?.credits[1]?.at.getTime() ?? 0) - (newest?.at.getTime() ?? 0))).toBeLessThan(2);
    const shelf = shelfOf(prisma.$holdfast, { name: "articles" });
    await shelf.increase("MUG", 3);
    await shelf.decrease("MUG", 1, { source: "ORDER" });
    const article = await prisma.article.findUnique({
      where: { sku: "MUG" },
      include: { movements: { where: { source: "ORDER" } } },
    });
    expect(article?.movements).toMatchObject([
      { kind: "apply", quantity: -1n, balance: 2n, location: "main" },
    ]);
  });
});

/** Of docs/adapters/prisma.md. */
function viewsOfThePage(): string[] {
  const text = readFileSync(new URL("../../docs/adapters/prisma.md", import.meta.url), "utf8");
  const [, block = ""] = /^```sql\n(CREATE VIEW credit_entry.*?)^```$/ms.exec(text) ?? [];
  const views = block.replaceAll("holdfast.", "holdfast_").split(";\n").filter(Boolean);
  expect(views).toHaveLength(2);
  return views;
}

test("SQLite is refused, since whoever uses the client meanwhile is in the transaction too", async () => {
  const prisma = new SqliteClient({ adapter: new PrismaBetterSqlite3({ url: ":memory:" }) });
  try {
    expect(() => fromPrisma(prisma)).toThrow(UnsupportedError);
    expect(() => fromPrisma(prisma)).toThrow(/holdfast\/better-sqlite3/);
    expect(() => prisma.$extends(holdfast())).toThrow(UnsupportedError);
    // The reason: should this ever fail, it is gone.
    await prisma.$executeRawUnsafe(
      "CREATE TABLE upload (id integer PRIMARY KEY, user_id text NOT NULL, bytes integer NOT NULL)",
    );
    const rolledBack = prisma.$transaction(async () => {
      const { id } = await prisma.upload.create({ data: { userId: "somebody else", bytes: 1 } });
      expect(id).toBe(1);
      throw new Error("not kept");
    });
    await expect(rolledBack).rejects.toThrow("not kept");
    expect(await prisma.upload.count()).toBe(0);
  } finally {
    await prisma.$disconnect();
  }
});
