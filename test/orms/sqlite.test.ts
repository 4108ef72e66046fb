/** What is special about ORMs on SQLite, where most have one connection for everybody in the process. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { fileURLToPath } from "node:url";
import { createClient } from "@libsql/client";
import {
  MikroORM,
  UniqueConstraintViolationException,
  defineEntity,
  type SqlEntityManager,
} from "@mikro-orm/sqlite";
import Sqlite from "better-sqlite3";
import { DrizzleQueryError, asc } from "drizzle-orm";
import { drizzle as drizzleBetterSqlite3 } from "drizzle-orm/better-sqlite3";
import { type LibSQLDatabase, drizzle } from "drizzle-orm/libsql";
import { integer, sqliteTable, text } from "drizzle-orm/sqlite-core";
import {
  type Database,
  DeadlineExceededError,
  type Holdfast,
  type HoldfastOptions,
  LockNotAvailableError,
  NotInTransactionError,
  PoolExhaustedError,
  UnsupportedError,
  WrongConnectionError,
  holdfast,
  isUniqueViolation,
  key,
  sql as statement,
} from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromDrizzle } from "holdfast/drizzle";
import { fromKnex } from "holdfast/knex";
import { fromKysely } from "holdfast/kysely";
import { fromMikroOrm } from "holdfast/mikro-orm";
import { fromTypeorm } from "holdfast/typeorm";
import makeKnex, { type Knex } from "knex";
import { CamelCasePlugin, Kysely, PGliteDialect, SqliteDialect, type Transaction, sql } from "kysely";
import { DataSource, EntityManager, EntitySchema, QueryFailedError } from "typeorm";
import { afterEach, beforeEach, describe, expect, test } from "vitest";

interface Account {
  id: number;
  ownerName: string;
}

/** One ORM on one file. */
interface Opened<Native = any> {
  readonly database: Database<Native>;
  /** By its entities or builders, in the transaction or with the outer client. */
  insert(native: Native, account: Account): Promise<unknown>;
  names(native: Native): Promise<string[]>;
  /** A builder's query, not run. */
  query(native: Native): object;
  readonly outer: Native;
  nested(native: Native, body: (inner: Native) => Promise<unknown>): Promise<unknown>;
  own<T>(body: (native: Native) => Promise<T>): Promise<T>;
  /** Ends the transaction of a body without Holdfast. */
  commit(native: Native): Promise<unknown>;
  close(): Promise<unknown>;
}

interface Orm {
  readonly name: string;
  open(file: string): Promise<Opened>;
  /** What it throws of a unique violation. */
  readonly error: new (...args: any[]) => Error;
  /** One connection for everybody in the process. */
  readonly single: boolean;
}

interface Tables {
  account: Account;
}

async function openKysely(file: string): Promise<Opened<Kysely<Tables>>> {
  const db = new Kysely<Tables>({
    dialect: new SqliteDialect({ database: new Sqlite(file) }),
    // It must not reach our own statements.
    plugins: [new CamelCasePlugin()],
  });
  const query = (on: Kysely<Tables>) => on.selectFrom("account").select("ownerName").orderBy("id");
  return {
    database: fromKysely(db),
    outer: db,
    insert: (on, account) => on.insertInto("account").values(account).execute(),
    names: async (on) => (await query(on).execute()).map(({ ownerName }) => ownerName),
    query,
    // Kysely nests by savepoints of controlled transactions only.
    async nested(trx, body) {
      await sql`SAVEPOINT inside`.execute(trx);
      try {
        await body(trx);
      } catch (error) {
        await sql`ROLLBACK TO inside`.execute(trx);
        throw error;
      }
    },
    own: (body) => db.transaction().execute((trx) => body(trx)),
    commit: (trx) => sql`COMMIT`.execute(trx),
    close: () => db.destroy(),
  };
}

async function openKnex(filename: string): Promise<Opened<Knex>> {
  const knex = makeKnex({
    client: "better-sqlite3",
    connection: { filename },
    useNullAsDefault: true,
    log: { warn: () => {} },
  });
  const query = (on: Knex) => on("account").select({ ownerName: "owner_name" }).orderBy("id");
  return {
    database: fromKnex(knex) as never,
    outer: knex,
    insert: (on, { id, ownerName }) => on("account").insert({ id, owner_name: ownerName }),
    names: async (on) => (await query(on)).map(({ ownerName }) => String(ownerName)),
    query,
    nested: (trx, body) => trx.transaction((inner) => body(inner)),
    own: (body) => knex.transaction((trx) => body(trx)),
    commit: (trx) => Promise.resolve((trx as Knex.Transaction).commit()),
    close: () => knex.destroy(),
  };
}

const AccountSchema = new EntitySchema<Account>({
  name: "Account",
  tableName: "account",
  columns: { id: { type: "int", primary: true }, ownerName: { name: "owner_name", type: "text" } },
});

async function openTypeorm(database: string): Promise<Opened<EntityManager>> {
  const dataSource = await new DataSource({
    type: "better-sqlite3",
    database,
    entities: [AccountSchema],
  }).initialize();
  const query = (on: EntityManager) => on.createQueryBuilder(AccountSchema, "a").orderBy("a.id");
  return {
    database: fromTypeorm(dataSource),
    outer: dataSource.manager,
    insert: (on, account) => on.save(AccountSchema, account),
    names: async (on) =>
      (await on.find(AccountSchema, { order: { id: "ASC" } })).map(({ ownerName }) => ownerName),
    query,
    nested: (manager, body) => manager.transaction(body),
    own: (body) => dataSource.transaction(body),
    commit: (manager) => (manager.queryRunner as NonNullable<typeof manager.queryRunner>).commitTransaction(),
    close: () => dataSource.destroy(),
  };
}

const AccountEntity = defineEntity({
  name: "Account",
  tableName: "account",
  properties: (p) => ({ id: p.integer().primary(), ownerName: p.text() }),
});

async function openMikroOrm(dbName: string): Promise<Opened<SqlEntityManager>> {
  const orm = await MikroORM.init({ dbName, entities: [AccountEntity], logger: () => {} });
  const em = () => orm.em.fork();
  const query = (on: SqlEntityManager) => on.createQueryBuilder(AccountEntity, "a").orderBy({ id: "asc" });
  return {
    database: fromMikroOrm(orm),
    get outer() {
      return em();
    },
    async insert(on, account) {
      on.create(AccountEntity, account);
      await on.flush();
    },
    names: async (on) =>
      (await on.find(AccountEntity, {}, { orderBy: { id: "asc" } })).map(({ ownerName }) => ownerName),
    query,
    nested: (on, body) => on.transactional((inner) => body(inner)),
    own: (body) => em().transactional((own) => body(own)),
    commit: (on) => on.commit(),
    close: () => orm.close(),
  };
}

const accountTable = sqliteTable("account", {
  id: integer().primaryKey(),
  ownerName: text("owner_name").notNull(),
});

async function openDrizzle(file: string): Promise<Opened<LibSQLDatabase>> {
  const client = createClient({ url: `file:${file}` });
  const db = drizzle(client);
  const query = (on: LibSQLDatabase) => on.select().from(accountTable).orderBy(asc(accountTable.id));
  return {
    database: fromDrizzle(db) as never,
    outer: db,
    insert: (on, account) => on.insert(accountTable).values(account),
    names: async (on) => (await query(on)).map(({ ownerName }) => ownerName),
    query,
    nested: (tx, body) => tx.transaction((inner) => body(inner as never)),
    own: (body) => db.transaction((tx) => body(tx as never)),
    commit: (tx) => tx.run("COMMIT"),
    close: async () => client.close(),
  };
}

const orms: readonly Orm[] = [
  { name: "Kysely", open: openKysely, error: Sqlite.SqliteError, single: true },
  { name: "Knex", open: openKnex, error: Sqlite.SqliteError, single: true },
  { name: "TypeORM", open: openTypeorm, error: QueryFailedError, single: true },
  { name: "MikroORM", open: openMikroOrm, error: UniqueConstraintViolationException, single: true },
  { name: "Drizzle", open: openDrizzle, error: DrizzleQueryError, single: false },
];

let folder: string;
let file: string;

function create(path: string, mode: "WAL" | "DELETE"): string {
  const db = new Sqlite(path);
  db.pragma(`journal_mode = ${mode}`);
  db.exec("CREATE TABLE account (id integer PRIMARY KEY, owner_name text NOT NULL UNIQUE)");
  db.close();
  return path;
}

beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "holdfast-sqlite-"));
  file = create(join(folder, "test.db"), "WAL");
});

afterEach(() => rm(folder, { recursive: true, force: true }));

const thisFile = basename(fileURLToPath(import.meta.url));
const ada = { id: 1, ownerName: "ada" };
const bob = { id: 2, ownerName: "bob" };
const caught = (running: Promise<unknown>) =>
  running.then(
    () => undefined,
    (error: unknown) => error,
  );
const turns = () => new Promise((resolve) => setTimeout(resolve, 20));

class Undo extends Error {}

let orm: Opened;
let hf: Holdfast<any>;
const instances: Holdfast<any>[] = [];

function make(options: HoldfastOptions = {}): Holdfast<any> {
  const made = holdfast(orm.database, options);
  instances.push(made);
  return made;
}

function using(open: Orm["open"]): void {
  beforeEach(async () => {
    orm = await open(file);
    hf = make({ wrongConnection: "off" });
  });
  afterEach(async () => {
    for (const each of instances.splice(0)) await each.close();
    await orm.close();
  });
}

describe.each(orms)("$name", ({ open, error: Unique }) => {
  using(open);

  test("entities and builders work in the transaction, and are kept with it", async () => {
    await hf.transaction({ lock: key("a") }, async (tx) => {
      await orm.insert(tx.client, ada);
      expect(await orm.names(tx.client)).toEqual(["ada"]);
      // On its connection, and with the names of the table.
      expect(await tx.query(statement`SELECT owner_name FROM account`)).toEqual([{ owner_name: "ada" }]);
    });
    expect(await orm.names(orm.outer)).toEqual(["ada"]);
  });

  test("a body that throws leaves nothing", async () => {
    const failed = hf.transaction(async (tx) => {
      await orm.insert(tx.client, ada);
      throw new Undo();
    });
    await expect(failed).rejects.toBeInstanceOf(Undo);
    expect(await orm.names(orm.outer)).toEqual([]);
    await hf.transaction((tx) => orm.insert(tx.client, bob));
    expect(await orm.names(orm.outer)).toEqual(["bob"]);
  });

  test("an error of the ORM is its own, and one that is swallowed does not undo the rest", async () => {
    const error = await hf.transaction(async (tx) => {
      await orm.insert(tx.client, ada);
      const violated = await caught(orm.nested(tx.client, (inner) => orm.insert(inner, { ...ada, id: 9 })));
      await tx.query(statement`INSERT INTO account VALUES (2, 'bob')`);
      return violated;
    });
    expect(error).toBeInstanceOf(Unique);
    expect(isUniqueViolation(error)).toBe(true);
    expect(await orm.names(orm.outer)).toEqual(["ada", "bob"]);
    const passed = await caught(hf.transaction((tx) => orm.insert(tx.client, { ...ada, id: 9 })));
    expect(passed).toBeInstanceOf(Unique);
  });

  test("the ORM's own transactions inside of it are savepoints", async () => {
    await hf.transaction(async (tx) => {
      await orm.insert(tx.client, ada);
      const undone = orm.nested(tx.client, async (inner) => {
        await orm.insert(inner, bob);
        throw new Undo();
      });
      await expect(undone).rejects.toBeInstanceOf(Undo);
      await orm.nested(tx.client, (inner) => orm.insert(inner, { id: 3, ownerName: "cy" }));
    });
    expect(await orm.names(orm.outer)).toEqual(["ada", "cy"]);
  });

  test("tx.rows takes a query of its builder", async () => {
    await hf.transaction(async (tx) => {
      await orm.insert(tx.client, ada);
      expect(await tx.rows(orm.query(tx.client), { wait: "skip" })).toMatchObject([{ ownerName: "ada" }]);
    });
    const readOnly = hf.transaction({ readOnly: true }, (tx) => tx.rows(orm.query(tx.client)));
    await expect(readOnly).rejects.toMatchObject({ code: "HF_USAGE" });
  });

  test("a read-only transaction writes nothing, and the next one may again", async () => {
    await expect(hf.transaction({ readOnly: true }, (tx) => orm.insert(tx.client, ada))).rejects.toThrow();
    await hf.transaction((tx) => orm.insert(tx.client, bob));
    expect(await orm.names(orm.outer)).toEqual(["bob"]);
  });

  test("a quota is exact, with another instance of the ORM on the file", async () => {
    const other = await open(file);
    const second = holdfast(other.database);
    const one = (instance: Holdfast<any>, at: Opened, id: number) =>
      instance.transaction({ lock: key("quota"), wait: 30_000 }, async (tx) => {
        const names = await at.names(tx.client);
        await turns();
        if (names.length < 5) await at.insert(tx.client, { id, ownerName: `n${id}` });
      });
    const ids = Array.from({ length: 16 }, (_, i) => i + 1);
    await Promise.all(ids.map((id) => (id % 2 ? one(hf, orm, id) : one(second, other, id))));
    expect(await orm.names(orm.outer)).toHaveLength(5);
    await second.close();
    await other.close();
  });

  test("a body that ends the transaction itself is told", async () => {
    const ended = await caught(
      hf.transaction(async (tx) => {
        await orm.insert(tx.client, ada);
        await orm.commit(tx.client);
      }),
    );
    expect(ended).toBeInstanceOf(Error);
    // And nothing is left of it.
    await hf.transaction((tx) => orm.insert(tx.client, bob));
    expect(await orm.names(orm.outer)).toEqual(["ada", "bob"]);
  });

  test("its client is of no use after the end", async () => {
    const late = await hf.transaction(async (tx) => tx.client);
    await hf.transaction(async (tx) => {
      await orm.insert(tx.client, ada);
      await expect(orm.insert(late, bob)).rejects.toThrow();
    });
    expect(await orm.names(orm.outer)).toEqual(["ada"]);
  });

  test("a query through the outer client is told of", async () => {
    const guard = make({ wrongConnection: "throw" });
    const error = await caught(guard.transaction(() => orm.names(orm.outer)));
    expect(error).toBeInstanceOf(WrongConnectionError);
    expect((error as Error).message.split(thisFile)).toHaveLength(3);
    await guard.transaction(async (tx) => {
      await orm.insert(tx.client, ada);
      await orm.nested(tx.client, (inner) => orm.names(inner));
      await tx.rows(orm.query(tx.client));
      await tx.lock(key("more"));
    });
    expect(await orm.names(orm.outer)).toEqual(["ada"]);
  });

  test("joins a transaction that is the writer, or becomes it", async () => {
    await orm.own(async (native) => {
      await hf.join(native).lock(key("joined"));
      await orm.insert(native, ada);
      await hf.join(native).lock(key("joined"), { wait: "nowait" });
    });
    expect(await orm.names(orm.outer)).toEqual(["ada"]);
    await expect(async () => hf.join(orm.outer).lock(key("x"))).rejects.toBeInstanceOf(NotInTransactionError);
  });
});

describe.each(orms.filter(({ single }) => single))("the one connection of $name", ({ open }) => {
  using(open);

  test("a wait for another process's transaction stops nobody", async () => {
    const db = new Sqlite(file);
    db.exec("BEGIN IMMEDIATE");
    let ticks = 0;
    const timer = setInterval(() => ticks++, 5);
    const waiting = hf.transaction({ lock: key("busy"), wait: 20_000 }, async () => "entered");
    while (ticks < 5) await turns();
    db.exec("COMMIT");
    expect(await waiting).toBe("entered");
    clearInterval(timer);
    db.close();
  });

  test("a query of somebody else's waits, and does not become part of the transaction", async () => {
    let enter!: () => void;
    const entered = new Promise<void>((resolve) => (enter = resolve));
    let leave!: () => void;
    const left = new Promise<void>((resolve) => (leave = resolve));
    const failing = hf.transaction(async (tx) => {
      await orm.insert(tx.client, ada);
      enter();
      await left;
      throw new Undo();
    });
    await entered;
    let written = false;
    const beside = orm.insert(orm.outer, bob).then(() => (written = true));
    const transaction = orm.own((own) => orm.insert(own, { id: 3, ownerName: "cy" }));
    await turns();
    expect(written).toBe(false);
    leave();
    await expect(failing).rejects.toBeInstanceOf(Undo);
    await Promise.all([beside, transaction]);
    expect(await orm.names(orm.outer)).toEqual(["bob", "cy"]);
  });

  test("and a transaction waits for one of the ORM's own", async () => {
    const order: string[] = [];
    let enter!: () => void;
    const entered = new Promise<void>((resolve) => (enter = resolve));
    const own = orm.own(async (native) => {
      await orm.insert(native, ada);
      enter();
      await turns();
      order.push("own");
    });
    await entered;
    await hf.transaction(async (tx) => {
      order.push("ours");
      expect(await orm.names(tx.client)).toEqual(["ada"]);
    });
    await own;
    expect(order).toEqual(["own", "ours"]);
  });

  test("an outer query in the body fails at once instead of waiting for itself", async () => {
    const error = await caught(hf.transaction(() => orm.names(orm.outer)));
    expect(error).toBeInstanceOf(PoolExhaustedError);
    expect(await orm.names(orm.outer)).toEqual([]);
  });

  test("whoever has the key is waited for at the door, or not at all", async () => {
    await hf.transaction({ lock: key("a") }, async () => {
      const refused = hf.outside(() => hf.transaction({ lock: key("a"), wait: "nowait" }, async () => 1));
      await expect(refused).rejects.toBeInstanceOf(LockNotAvailableError);
    });
  });

  test("a deferred transaction that somebody has overtaken is refused by join", async () => {
    const db = new Sqlite(file);
    await orm.own(async (native) => {
      await orm.names(native);
      db.exec("INSERT INTO account VALUES (7, 'gil')");
      await expect(hf.join(native).lock(key("x"))).rejects.toBeInstanceOf(NotInTransactionError);
    });
    db.close();
  });

  test("a reader in the way of COMMIT stops nobody, where there is no WAL", async () => {
    const path = create(join(folder, "plain.db"), "DELETE");
    const other = await open(path);
    const second = holdfast(other.database);
    const db = new Sqlite(path);
    db.exec("BEGIN");
    db.prepare("SELECT * FROM account").all();
    let ticks = 0;
    const timer = setInterval(() => ticks++, 5);
    const waiting = second.transaction((tx) => other.insert(tx.client, ada));
    while (ticks < 5) await turns();
    db.exec("COMMIT");
    await waiting;
    clearInterval(timer);
    expect(await other.names(other.outer)).toEqual(["ada"]);
    db.close();
    await second.close();
    await other.close();
  });

  test("a body that does not end is given up, and what it does later is not kept", async () => {
    let go!: () => void;
    const gone = new Promise<void>((resolve) => (go = resolve));
    let later: Promise<unknown> | undefined;
    const givenUp = hf.transaction({ deadline: 1500 }, async (tx) => {
      await orm.insert(tx.client, ada);
      await gone;
      later = caught(orm.insert(tx.client, bob));
      await later;
    });
    await expect(givenUp).rejects.toBeInstanceOf(DeadlineExceededError);
    await hf.transaction(async (tx) => {
      go();
      await turns();
      expect(await later).toBeInstanceOf(Error);
      await orm.insert(tx.client, { id: 3, ownerName: "cy" });
    });
    expect(await orm.names(orm.outer)).toEqual(["cy"]);
  });

  test("the caller's busy_timeout is left as it was", async () => {
    const timeout = () =>
      hf.transaction(async (tx) => (await tx.query(statement`PRAGMA busy_timeout`))[0]?.timeout);
    expect(await timeout()).toBe(5000);
    expect(await timeout()).toBe(5000);
  });
});

test("Kysely: a stream that a body has left open keeps everybody out until it ends", async () => {
  const kysely = await openKysely(file);
  const instance = holdfast(kysely.database);
  await instance.transaction(async (tx) => {
    await kysely.insert(tx.client, ada);
    await kysely.insert(tx.client, bob);
  });
  let rows: AsyncIterator<unknown> | undefined;
  const givenUp = instance.transaction({ deadline: 300 }, async (tx) => {
    await kysely.insert(tx.client, { id: 3, ownerName: "cy" });
    rows = tx.client.selectFrom("account").selectAll().stream()[Symbol.asyncIterator]();
    await rows.next();
    await new Promise(() => {});
  });
  await expect(givenUp).rejects.toBeInstanceOf(DeadlineExceededError);
  const next = instance.transaction((tx) => kysely.insert(tx.client, { id: 4, ownerName: "dee" }));
  await turns();
  await rows?.return?.();
  await next;
  expect(await kysely.names(kysely.outer)).toEqual(["ada", "bob", "dee"]);
  await instance.close();
  await kysely.close();
});

test("MikroORM: what was not flushed is part of the transaction, or of none", async () => {
  const orm = await MikroORM.init({ dbName: file, entities: [AccountEntity], logger: () => {} });
  const hf = holdfast(fromMikroOrm(orm));
  const failing = hf.transaction(async ({ client: em }) => {
    em.create(AccountEntity, ada);
    throw new Undo();
  });
  await expect(failing).rejects.toBeInstanceOf(Undo);
  await hf.transaction(async ({ client: em }) => {
    em.create(AccountEntity, bob);
    // The context is MikroORM's own, as inside of em.transactional.
    expect(orm.em.getTransactionContext()).toBe(em.getTransactionContext());
  });
  expect(await orm.em.fork().find(AccountEntity, {})).toMatchObject([bob]);
  await hf.close();
  await orm.close();
});

test("TypeORM: subscribers are told of the transaction, and a database in memory will do", async () => {
  const told: string[] = [];
  class Told {
    beforeTransactionStart = () => void told.push("begin");
    afterTransactionCommit = () => void told.push("committed");
    afterTransactionRollback = () => void told.push("rolled back");
  }
  const dataSource = await new DataSource({
    type: "better-sqlite3",
    database: ":memory:",
    entities: [AccountSchema],
    synchronize: true,
  }).initialize();
  dataSource.subscribers.push(new Told());
  const hf = holdfast(fromTypeorm(dataSource));
  await hf.transaction(({ client }) => client.save(AccountSchema, ada));
  await caught(
    hf.transaction(async ({ client }) => {
      await client.save(AccountSchema, bob);
      throw new Undo();
    }),
  );
  expect(told).toEqual(["begin", "committed", "begin", "rolled back"]);
  expect(await dataSource.manager.find(AccountSchema)).toEqual([ada]);
  const open = hf.transaction(async ({ client }) => {
    await client.queryRunner?.startTransaction();
    await client.save(AccountSchema, bob);
  });
  await expect(open).rejects.toMatchObject({ code: "HF_USAGE" });
  expect(await dataSource.manager.count(AccountSchema)).toBe(1);
  await hf.close();
  await dataSource.destroy();
});

test("what is not reached is refused, with a word about what to do", async () => {
  const handle = new Sqlite(file);
  expect(() => fromDrizzle(drizzleBetterSqlite3(handle))).toThrow(
    /fromBetterSqlite3\(db\.\$client\).*drizzle\(tx\.client\)/,
  );
  // Which works.
  const hf = holdfast(fromBetterSqlite3(handle));
  await hf.transaction(async (tx) => {
    drizzleBetterSqlite3(tx.client).insert(accountTable).values(ada).run();
  });
  expect(drizzleBetterSqlite3(handle).select().from(accountTable).all()).toEqual([ada]);
  await hf.close();
  handle.close();
  const pglite = new Kysely<unknown>({ dialect: new PGliteDialect({ pglite: {} as never }) });
  expect(() => fromKysely(pglite)).toThrow(/fromPglite/);
  const { client } = makeKnex({
    client: "better-sqlite3",
    connection: { filename: file },
    useNullAsDefault: true,
  });
  const knex = Object.assign(() => {}, {
    raw() {},
    transaction() {},
    client: { ...client, driverName: "sqlite3" },
  });
  expect(() => fromKnex(knex as never)).toThrow(UnsupportedError);
});

test("the types are the ORM's own", async () => {
  const db = new Kysely<Tables>({ dialect: new SqliteDialect({ database: new Sqlite(file) }) });
  const hf: Holdfast<Transaction<Tables>> = holdfast(fromKysely(db));
  expect((await hf.capabilities()).connections).toBe("one");
  await hf.close();
  await db.destroy();
});
