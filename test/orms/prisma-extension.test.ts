/** What `prisma.$extends(holdfast())` adds, and the rest of Holdfast with Prisma's own transactions. */
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import process from "node:process";
import { PrismaPg } from "@prisma/adapter-pg";
import {
  type Holdfast,
  NotInTransactionError,
  RowsMissingError,
  StaleVersionError,
  UsageError,
  fenced,
  once,
} from "holdfast";
import { type TransactionOf, holdfast, key } from "holdfast/prisma";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Client } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { prisma6 } from "../../older/clients.ts";
import { type Prisma, PrismaClient } from "../generated/prisma/client.ts";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";
import { eventually } from "../harness/wait.ts";

const missing = unavailable("postgres");
let database: TestDatabase;
let client: Client;

function open() {
  const adapter = new PrismaPg({ connectionString: database.url, max: 6 });
  return new PrismaClient({ adapter }).$extends(holdfast({ wait: 60_000 }));
}
let prisma: ReturnType<typeof open>;
type Tx = TransactionOf<typeof prisma>;

const order = "0b9a4a44-3f1c-4a51-9d6b-1f7d5f6e2a10";

beforeAll(async () => {
  if (missing !== undefined) return;
  database = await createDatabase("postgres");
  client = new Client({ connectionString: database.url });
  await client.connect();
  await client.query(`
    CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes integer NOT NULL);
    CREATE TABLE document (id integer PRIMARY KEY, body text NOT NULL, version integer NOT NULL DEFAULT 0);
    CREATE TABLE "user" (id text PRIMARY KEY, name text NOT NULL);
    CREATE TABLE article (sku text PRIMARY KEY, name text NOT NULL);
    CREATE SCHEMA shop;
    CREATE TYPE shop.line_state AS ENUM ('open', 'packed', 'shipped');
    CREATE TABLE shop."order line" (
      order_id uuid NOT NULL, line_no integer NOT NULL, state shop.line_state NOT NULL DEFAULT 'open',
      qty integer NOT NULL, version bigint NOT NULL DEFAULT 0, price numeric NOT NULL DEFAULT 0,
      product_id integer, PRIMARY KEY (order_id, line_no));
  `);
  prisma = open();
  await prisma.$holdfast.migrate();
});

afterAll(async () => {
  if (missing !== undefined) return;
  await prisma.$holdfast.close();
  await prisma.$disconnect();
  await client.end();
  await database.drop();
});

beforeEach(async ({ skip }) => {
  skip(missing !== undefined, missing);
  await client.query(`TRUNCATE upload, document, shop."order line" RESTART IDENTITY`);
  await client.query("INSERT INTO document VALUES (1, '', 0)");
  await client.query(`INSERT INTO shop."order line" (order_id, line_no, qty) VALUES ('${order}', 1, 10)`);
});

const pid = async (tx: Pick<Prisma.TransactionClient, "$queryRaw">) =>
  (await tx.$queryRaw<{ pid: number }[]>`SELECT pg_backend_pid() AS pid`)[0]?.pid;

const times = <T>(count: number, call: (i: number) => Promise<T>) =>
  Promise.all(Array.from({ length: count }, (_, i) => call(i)));

describe("transactions", () => {
  test("$exact, with options and without", async () => {
    const upload = async (tx: Tx) => {
      const { _sum } = await tx.upload.aggregate({ where: { userId: "ada" }, _sum: { bytes: true } });
      if ((_sum.bytes ?? 0) + 10 > 70) return false;
      await tx.upload.create({ data: { userId: "ada", bytes: 10 } });
      return true;
    };
    const done = await times(12, (i) =>
      i % 2 === 0
        ? prisma.$exact({ lock: key("upload", "ada") }, upload)
        : prisma.$exact(async (tx) => {
            await tx.$lock(key("upload", "ada"));
            return upload(tx);
          }),
    );
    expect(done.filter(Boolean)).toHaveLength(7);
    expect(await prisma.upload.count()).toBe(7);
  });

  test("a typo in its options is named as $exact's", async () => {
    const typo = { lok: key("upload", "ada") } as never;
    await expect(prisma.$exact(typo, async () => 1)).rejects.toThrow(/^\$exact: there is no option `lok`/);
  });

  test("inside of a transaction, also of Prisma's own, $exact is a savepoint of it", async () => {
    await prisma.$transaction(async (tx) => {
      await tx.upload.create({ data: { userId: "kept", bytes: 1 } });
      const undone = tx.$exact({ lock: key("inner") }, async (inner) => {
        expect(await pid(inner)).toBe(await pid(tx));
        await inner.upload.create({ data: { userId: "undone", bytes: 1 } });
        throw new Error("undone");
      });
      await expect(undone).rejects.toThrow("undone");
    });
    await prisma.$exact(async (tx) => {
      await prisma.$exact(async (inner) => expect(await pid(inner)).toBe(await pid(tx)));
    });
    const rows = await prisma.upload.findMany();
    expect(rows.map(({ userId }) => userId)).toEqual(["kept"]);
  });

  test("$tryLock says whether the lock is free", async () => {
    await prisma.$exact({ lock: key("report") }, async () => {
      const busy = await prisma.$outside(() => prisma.$tryLock(key("report"), async () => "mine"));
      expect(busy).toEqual({ acquired: false });
      await prisma.$outside(() =>
        prisma.$transaction(async (tx) => {
          expect(await tx.$tryLock(key("report"))).toBe(false);
          expect(await tx.$tryLock(key("another"))).toBe(true);
          const inner = await tx.$tryLock(
            key("third"),
            async (same) => (await pid(same)) === (await pid(tx)),
          );
          expect(inner).toEqual({ acquired: true, value: true });
        }),
      );
    });
    expect(await prisma.$tryLock(key("report"), (tx) => tx.upload.count())).toEqual({
      acquired: true,
      value: 0,
    });
    await expect(prisma.$tryLock(key("report"))).rejects.toThrow(NotInTransactionError);
  });

  test("clients that were extended further share one instance, and their transactions have what they have", async () => {
    const forUser = (userId: string) =>
      prisma.$extends({ model: { upload: { mine: () => prisma.upload.count({ where: { userId } }) } } });
    const ada = forUser("ada");
    expect(ada.$holdfast).toBe(prisma.$holdfast);
    await ada.$exact(async (tx) => {
      expect(await prisma.$outside(() => tx.upload.mine())).toBe(0);
      // What knows nothing of the other one is in its transaction all the same.
      await prisma.$exact(async (inner) => expect(await pid(inner)).toBe(await pid(tx)));
    });
    const another = open();
    try {
      await ada.$exact(async () => {
        const own = another.$holdfast.transaction({}, async (tx) =>
          (tx.client as Prisma.TransactionClient).upload.count(),
        );
        expect(await own).toBe(0);
      });
    } finally {
      await another.$holdfast.close();
      await another.$disconnect();
    }
  });
});

describe("the rest of Holdfast", () => {
  test("patterns take part in Prisma's own transactions, and in those of $exact", async () => {
    const hf = prisma.$holdfast;
    const credits = quota(hf, { name: "images", limit: 7 });
    const shelf = stock(hf);
    const emails = queue<{ to: string }>(hf, "emails");
    await shelf.increase("CAP", 5);
    const buy = async (tx: Tx, i: number) => {
      await tx.upload.create({ data: { userId: "ada", bytes: i } });
      await shelf.decrease("CAP", 1, { tx });
      // Two at once, in one transaction.
      await Promise.all([credits.consume("ada", 1, { tx }), emails.enqueue({ to: "ada" }, { tx })]);
    };
    const results = await Promise.allSettled(
      Array.from({ length: 12 }, (_, i) =>
        i % 2 === 0
          ? prisma.$transaction((tx) => buy(tx, i), { maxWait: 60_000, timeout: 60_000 })
          : prisma.$exact((tx) => buy(tx, i)),
      ),
    );
    expect(results.filter(({ status }) => status === "fulfilled")).toHaveLength(5);
    const [{ used }, { onHand }, { waiting }] = await Promise.all([
      credits.peek("ada"),
      shelf.level("CAP"),
      emails.counts(),
    ]);
    expect([await prisma.upload.count(), used, onHand, waiting]).toEqual([5, 5, 0, 5]);
  });

  test("once, leases and jobs do too", async () => {
    const hf = prisma.$holdfast;
    const paid = () =>
      prisma.$transaction((tx) =>
        once(
          hf,
          ["stripe", "evt_1"],
          async () => (await tx.upload.create({ data: { userId: "a", bytes: 1 } })).id,
          {
            tx,
          },
        ),
      );
    const [first, second] = [await paid(), await paid()];
    expect([first.replayed, second.replayed, first.value === second.value]).toEqual([false, true, true]);
    const lease = await hf.lease(key("export"));
    await prisma.$exact((tx) => fenced(tx, lease));
    await prisma.$transaction((tx) => fenced(tx, lease));
    await lease.release();
    await expect(prisma.$transaction((tx) => fenced(tx, lease))).rejects.toMatchObject({
      code: "HF_STALE_FENCE",
    });
    const jobs = queue<number>(hf, "resize");
    await jobs.enqueueMany([{ payload: 1 }, { payload: 2 }]);
    const worker = jobs.work(async (job) => {
      await prisma.$transaction(async (tx) => {
        await tx.upload.create({ data: { userId: "job", bytes: job.payload } });
        await job.complete(tx);
      });
    });
    await eventually(async () => (await prisma.upload.count({ where: { userId: "job" } })) === 2);
    await worker.stop();
    expect(await prisma.upload.count({ where: { userId: "job" } })).toBe(2);
  });

  test("what is no transaction is refused", async () => {
    const uses = quota(prisma.$holdfast, { name: "refused", limit: 7 });
    await expect(uses.consume("ada", 1, { tx: prisma })).rejects.toThrow(/the PrismaClient itself/);
    await expect(uses.consume("ada", 1, { tx: {} })).rejects.toBeInstanceOf(NotInTransactionError);
    await expect(uses.consume("ada", 1, { tx: "x" as never })).rejects.toBeInstanceOf(UsageError);
    expect((await uses.peek("ada")).used).toBe(0);
  });

  /** Whether the lock is taken, seen by another session. */
  const taken = async (hf: Holdfast<never>) => {
    const { holders } = await hf.inspect();
    return holders.length > 0;
  };

  test.each([
    [
      "Prisma 7",
      () => new PrismaClient({ adapter: new PrismaPg({ connectionString: database.url, max: 4 }) }),
      false,
    ],
    [
      "Prisma 7, connected before",
      () => new PrismaClient({ adapter: new PrismaPg({ connectionString: database.url, max: 4 }) }),
      true,
    ],
    ["Prisma 6", () => prisma6(database.url) as unknown as PrismaClient, false],
  ])("session locks: %s", async (_, make, early) => {
    const made = make();
    if (early) await made.upload.count();
    const own = made.$extends(holdfast());
    const hf = own.$holdfast;
    try {
      expect(await hf.capabilities()).toMatchObject({ sessionLocks: "session advisory", client: "prisma" });
      {
        await using held = await hf.hold(key("leader"));
        expect(await taken(hf as never)).toBe(true);
        expect(await prisma.$tryLock(key("leader"), async () => {})).toEqual({ acquired: false });
        expect(await prisma.$holdfast.hold(key("leader"), { wait: "skip" })).toBeUndefined();
        expect(held.signal.aborted).toBe(false);
      }
      expect((await prisma.$tryLock(key("leader"), async () => {})).acquired).toBe(true);
      // Its end is told of.
      const held = await hf.hold(key("leader"));
      await client.query(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
      );
      await eventually(() => held.signal.aborted);
      await held.release().catch(() => {});
      expect(await own.upload.count()).toBe(0);
      // And the rest of it.
      await own.$transaction((tx) => quota(hf, { name: "versions", limit: 3 }).consume("uses", 1, { tx }));
      const where = { orderId_position: { orderId: order, position: 1 } };
      const line = await own.orderLine.updateVersioned({
        where: { ...where, version: 0n },
        data: { quantity: 11 },
      });
      expect(line).toMatchObject({ quantity: 11, version: 1n });
    } finally {
      await hf.close();
      await made.$disconnect();
    }
  });
});

describe("updateVersioned", () => {
  test("of those who read the same version one writes", async () => {
    const results = await Promise.allSettled(
      Array.from({ length: 8 }, (_, i) =>
        prisma.document.updateVersioned({ where: { id: 1, version: 0 }, data: { body: `${i}` } }),
      ),
    );
    const [written, ...more] = results.flatMap((each) => (each.status === "fulfilled" ? [each.value] : []));
    expect(more).toEqual([]);
    expect(await prisma.document.findMany()).toEqual([written]);
    expect(written?.version).toBe(1);
    for (const each of results)
      if (each.status === "rejected") {
        expect(each.reason).toBeInstanceOf(StaleVersionError);
        expect(each.reason).toMatchObject({ table: "Document", expected: 0, found: 1 });
      }
  });

  test("a function decides anew, until nobody was faster", async () => {
    await times(20, (i) =>
      i % 2 === 0
        ? prisma.document.updateVersioned({ where: { id: 1 }, data: ({ body }) => ({ body: `${body}x` }) })
        : prisma.$exact((tx) =>
            tx.document.updateVersioned({
              where: { id: 1 },
              attempts: 1000,
              data: async ({ body }) => ({ body: `${body}x` }),
            }),
          ),
    );
    expect(await prisma.document.findUnique({ where: { id: 1 } })).toEqual({
      id: 1,
      body: "x".repeat(20),
      version: 20,
    });
    const same = await prisma.document.updateVersioned({
      where: { id: 1 },
      data: () => undefined,
      select: { version: true },
    });
    expect(same).toEqual({ version: 20 });
  });

  test("keys of several fields, mapped names, other conditions, and what is selected", async () => {
    const where = { orderId_position: { orderId: order, position: 1 } };
    const moved = await prisma.orderLine.updateVersioned({
      where: { ...where, version: 0n, quantity: { gte: 10 }, state: "Open" },
      data: { position: { set: 2 }, quantity: { decrement: 10 }, state: "Packed" },
      select: { position: true, quantity: true, version: true, state: true },
    });
    expect(moved).toEqual({ position: 2, quantity: 0, version: 1n, state: "Packed" });
    const gone = prisma.orderLine.updateVersioned({
      where: { ...where, version: 1n },
      data: { quantity: 1 },
    });
    await expect(gone).rejects.toBeInstanceOf(RowsMissingError);
    await client.query(`UPDATE shop."order line" SET line_no = 1`);
    const unfit = prisma.orderLine.updateVersioned({
      where: { ...where, version: 1n, quantity: { gte: 10 } },
      data: { quantity: 1 },
    });
    await expect(unfit).rejects.toBeInstanceOf(RowsMissingError);
  });

  test("in a transaction it is undone with it, also if it is called through the outer client", async () => {
    const undone = prisma.$exact(async (tx) => {
      await tx.document.updateVersioned({ where: { id: 1, version: 0 }, data: { body: "a" } });
      await prisma.document.updateVersioned({ where: { id: 1, version: 1 }, data: { body: "b" } });
      expect(await tx.document.findUnique({ where: { id: 1 } })).toMatchObject({ body: "b", version: 2 });
      throw new Error("undone");
    });
    await expect(undone).rejects.toThrow("undone");
    expect(await prisma.document.findUnique({ where: { id: 1 } })).toMatchObject({ body: "", version: 0 });
  });

  test("what cannot be exact is refused", async () => {
    const calls = [
      { where: { id: 1 }, data: { body: "blind" } },
      { where: { id: 1, version: { gte: 0 } }, data: { body: "vague" } },
      { where: { id: 1, version: 0 }, data: { body: "own", version: 7 } },
      { where: { id: 1, version: 0 }, data: { body: "typo" }, atempts: 3 },
      { where: { id: 1 }, data: () => ({}), version: "body2" },
    ];
    for (const call of calls)
      await expect(prisma.document.updateVersioned(call as never)).rejects.toBeInstanceOf(UsageError);
    expect(await prisma.document.findUnique({ where: { id: 1 } })).toMatchObject({ body: "", version: 0 });
  });
});

const page = readFileSync(new URL("../../docs/adapters/prisma.md", import.meta.url), "utf8");
/** What the page says in a language. */
const block = (language: string, containing: string) =>
  [...page.matchAll(new RegExp(`^\`\`\`${language}\\n(.*?)^\`\`\``, "gms"))]
    .map(([, text = ""]) => text)
    .find((text) => text.includes(containing)) ?? "";
const views = block("sql", "CREATE VIEW");

test("what the page begins with is exact", async () => {
  const generated = new URL("../generated/prisma-page.ts", import.meta.url);
  const text = block("ts", "export const upload").replace(
    "./generated/prisma/client.ts",
    "./prisma/client.ts",
  );
  writeFileSync(generated, text);
  process.env["DATABASE_URL"] = database.url;
  // Made just now: nothing of it is known to the compiler.
  const {
    prisma: its,
    upload,
    change,
  } = (await import(generated.href)) as {
    prisma: typeof prisma;
    upload(userId: string, bytes: number): Promise<unknown>;
    change(userId: string, id: number, body: string): Promise<unknown>;
  };
  try {
    const uploads = await Promise.allSettled(Array.from({ length: 9 }, () => upload("ada", 200_000)));
    expect(uploads.filter(({ status }) => status === "fulfilled")).toHaveLength(5);
    await quota(its.$holdfast, { name: "changes", limit: 100, per: "day" }).consume("ada", 97);
    const changes = await Promise.allSettled(Array.from({ length: 6 }, (_, i) => change("ada", 1, `${i}`)));
    expect(changes.filter(({ status }) => status === "fulfilled")).toHaveLength(3);
  } finally {
    await its.$holdfast.close();
    await its.$disconnect();
    rmSync(generated);
  }
});

test("the models of the page are those that are tried here", () => {
  const schema = readFileSync(new URL("../prisma/schema.prisma", import.meta.url), "utf8");
  expect(schema.replaceAll('  @@schema("public")\n', "")).toContain(block("prisma", "CreditEntry").trim());
});

test("its SQL can be migrations of Prisma's, also in an empty database, and again", async () => {
  const shadow = await createDatabase("postgres");
  const own = new Client({ connectionString: shadow.url });
  await own.connect();
  try {
    const migration = prisma.$holdfast.migrationSql();
    for (const text of [migration, views, migration]) await own.query(text);
    const { rows } = await own.query(
      "SELECT table_schema AS schema, table_name AS name FROM information_schema.tables WHERE table_schema IN ('public', 'holdfast') ORDER BY 1, 2",
    );
    // In the schema that Prisma looks at there is nothing but what it was told of.
    expect(rows.filter(({ schema }) => schema === "public").map(({ name }) => name as string)).toEqual([
      "article_movement",
      "credit_entry",
    ]);
    expect(rows.length).toBeGreaterThan(20);
  } finally {
    await own.end();
    await shadow.drop();
  }
});

test("ledger and movements are views, which `include` takes", async () => {
  await client.query(`${views}
    INSERT INTO "user" VALUES ('u1', 'Ada'), ('u2', 'Bob');
    INSERT INTO article VALUES ('MUG', 'Mug');
  `);
  const credits = quota(prisma.$holdfast, { name: "credits", limit: 0 });
  await credits.grant("u1", 10);
  await prisma.$transaction((tx) => credits.consume("u1", 4, { tx }));
  const users = await prisma.user.findMany({
    include: { credits: { select: { kind: true, amount: true, credit: true }, orderBy: { version: "asc" } } },
    orderBy: { id: "asc" },
  });
  expect(users.map(({ name, credits: entries }) => [name, entries])).toEqual([
    [
      "Ada",
      [
        { kind: "grant", amount: 10n, credit: 10n },
        { kind: "consume", amount: 4n, credit: 6n },
      ],
    ],
    ["Bob", []],
  ]);
  const shelf = stock(prisma.$holdfast, { name: "articles" });
  await shelf.increase("MUG", 3);
  await shelf.decrease("MUG", 1, { source: "ORDER" });
  const article = await prisma.article.findUnique({
    where: { sku: "MUG" },
    include: { movements: { where: { source: "ORDER" } } },
  });
  expect(article?.movements).toMatchObject([{ kind: "apply", quantity: -1n, balance: 2n, location: "main" }]);
});
