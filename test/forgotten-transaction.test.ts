/**
 * A call of ours inside a transaction that the caller has opened by the client's own means, and that does not name it. That each client
 * tells of its transactions is a case of the conformance suite ("join"); this is the rest.
 */
import { type Holdfast, PoolExhaustedError, WrongConnectionError, holdfast, once } from "holdfast";
import { fromKnex } from "holdfast/knex";
import { fromKysely } from "holdfast/kysely";
import { fromMariadb } from "holdfast/mariadb";
import { fromMikroOrm } from "holdfast/mikro-orm";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { holdfast as extension, fromPrisma } from "holdfast/prisma";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { fromSequelize } from "holdfast/sequelize";
import { stock } from "holdfast/stock";
import { fromTypeorm } from "holdfast/typeorm";
import { MikroORM as MikroOrmMysql } from "@mikro-orm/mysql";
import { MikroORM } from "@mikro-orm/postgresql";
import { PrismaPg } from "@prisma/adapter-pg";
import makeKnex from "knex";
import { Kysely, MysqlDialect, PostgresDialect } from "kysely";
import { createPool as createMariadbPool } from "mariadb";
import { createPool as createCallbackPool } from "mysql2";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import postgres from "postgres";
import { Sequelize } from "sequelize";
import { DataSource } from "typeorm";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { PrismaClient } from "./generated/prisma/client.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

let database: TestDatabase;
let sql: ReturnType<typeof postgres>;
beforeAll(async () => {
  if (unavailable("postgres") !== undefined) return;
  database = await createDatabase("postgres");
  sql = postgres(database.url, { onnotice: () => {} });
  await holdfast(fromPostgres(sql)).migrate();
});
afterAll(async () => {
  await sql?.end();
  await database?.drop();
});

class Undo extends Error {}
let made = 0;
const fresh = () => `forgotten${++made}`;

/** What is left of a use in a transaction that is rolled back. */
async function leftOf(
  hf: Holdfast<never>,
  transaction: (body: (tx: object) => Promise<void>) => Promise<unknown>,
  use: (uploads: ReturnType<typeof quota>, tx: object) => Promise<unknown>,
): Promise<number> {
  const uploads = quota(hf, { name: fresh(), limit: 5 });
  await uploads.peek("ada");
  const undone = transaction(async (tx) => {
    await use(uploads, tx);
    throw new Undo();
  });
  await expect(undone).rejects.toThrow(Undo);
  return (await uploads.peek("ada")).used;
}

test("postgres.js: with both places, for every pattern", async ({ skip }) => {
  skip(unavailable("postgres") !== undefined, unavailable("postgres"));
  await using hf = holdfast(fromPostgres(sql), { wrongConnection: "error" });
  const name = fresh();
  const calls: Readonly<Record<string, (options: { separate?: boolean }) => Promise<unknown>>> = {
    "quota.consume": (options) => quota(hf, { name, limit: 5 }).consume("ada", 1, options),
    "quota.peek": (options) => quota(hf, { name, limit: 5 }).peek("ada", options),
    "quota.grant": (options) => quota(hf, { name, limit: 5 }).grant("ada", 1, options),
    "stock.increase": (options) => stock(hf, { name }).increase("CAP", 1, options),
    "stock.levels": (options) => stock(hf, { name }).levels(options),
    "queue.enqueue": (options) => queue(hf, name).enqueue({}, options),
    once: (options) => once(hf, [name], async () => 1, options),
    "hf.transaction": (options) => hf.transaction(options, async () => {}),
  };
  for (const [call, make] of Object.entries(calls)) {
    await sql.begin(async () => {
      const error: unknown = await make({}).catch((thrown: unknown) => thrown);
      expect(error, call).toBeInstanceOf(WrongConnectionError);
      const { message } = error as Error;
      expect(message.match(/forgotten-transaction\.test\.ts:\d+:\d+/g), `${call}: ${message}`).toHaveLength(
        2,
      );
      await make({ separate: true });
      await hf.outside(() => make({}));
    });
    // Outside of a transaction it is what everybody does.
    await make({});
  }
});

test("what says so takes part, or is apart", async ({ skip }) => {
  skip(unavailable("postgres") !== undefined, unavailable("postgres"));
  await using hf = holdfast(fromPostgres(sql), { wrongConnection: "throw" }) as unknown as Holdfast<never>;
  const begin = (body: (tx: object) => Promise<void>) => sql.begin((tx) => body(tx));
  expect(await leftOf(hf, begin, (uploads, tx) => uploads.consume("ada", 1, { tx }))).toBe(0);
  expect(await leftOf(hf, begin, (uploads) => uploads.consume("ada", 1, { separate: true }))).toBe(1);
  const joined = await leftOf(hf, begin, async (uploads, tx) => {
    hf.join(tx as never);
    await uploads.consume("ada");
    expect((await uploads.peek("ada")).used).toBe(1);
  });
  expect(joined).toBe(0);
  // What goes on after the transaction is outside of it.
  const uploads = quota(hf, { name: fresh(), limit: 5 });
  let later: Promise<unknown> | undefined;
  let end!: () => void;
  const ended = new Promise<void>((resolve) => (end = resolve));
  await begin(async () => {
    later = ended.then(() => uploads.consume("ada"));
  });
  end();
  await later;
  expect((await uploads.peek("ada")).used).toBe(1);
});

test("Prisma: a client that was extended takes part by itself; another warns", async ({ skip }) => {
  skip(unavailable("postgres") !== undefined, unavailable("postgres"));
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: database.url, max: 4 }) });
  const extended = prisma.$extends(extension({ wrongConnection: "throw" }));
  const begin = (body: (tx: object) => Promise<void>) => extended.$transaction((tx) => body(tx));
  const hf = extended.$holdfast as unknown as Holdfast<never>;
  expect(await leftOf(hf, begin, (uploads) => uploads.consume("ada"))).toBe(0);
  expect(await leftOf(hf, begin, (uploads) => uploads.consume("ada", 1, { separate: true }))).toBe(1);
  await using plain = holdfast(fromPrisma(prisma), { wrongConnection: "throw" });
  await expect(
    prisma.$transaction(() => quota(plain, { name: fresh(), limit: 5 }).consume("ada"), { maxWait: 60_000 }),
  ).rejects.toThrow(WrongConnectionError);
  await hf.close();
  await prisma.$disconnect();
});

test("a pool of one: is told at once, and does not wait for itself", async ({ skip }) => {
  skip(unavailable("postgres") !== undefined, unavailable("postgres"));
  const one = new PrismaClient({ adapter: new PrismaPg({ connectionString: database.url, max: 1 }) });
  await using hf = holdfast(fromPrisma(one), { wrongConnection: "off" });
  const uploads = quota(hf, { name: fresh(), limit: 5 });
  await uploads.peek("ada");
  await expect(one.$transaction(() => uploads.consume("ada"))).rejects.toThrow(PoolExhaustedError);
  await expect(one.$transaction(() => uploads.peek("ada", { separate: true }))).rejects.toThrow(
    PoolExhaustedError,
  );
  await expect(one.$transaction(() => hf.transaction(async () => {}))).rejects.toThrow(PoolExhaustedError);
  await one.$transaction((tx) => uploads.consume("ada", 1, { tx }));
  expect((await uploads.peek("ada")).used).toBe(1);
  await one.$disconnect();
});

/** In the queue that the stack shows: vitest leaves out the word "async" where it shows another. */
const turn = () => new Promise<void>((resolve) => process.nextTick(resolve));

type Body<T> = (tx: object) => Promise<T>;

/** A client whose transactions are begun by hand. Each begins its own here, as an application would: that is what is tested. */
interface ByHand {
  readonly database: Parameters<typeof holdfast>[0];
  /** Nobody knows how full its pool is. */
  readonly hidesPool?: boolean;
  /** In a transaction, in one function. `forget` is given what ends it, and nothing else ends it. */
  own<T>(body: Body<T>, forget?: (end: () => Promise<unknown>) => void): Promise<T>;
  /** Returns a function that begins one, or none, before it waits for anything. */
  first(): Promise<(begins: boolean, body: () => Promise<unknown>) => Promise<void>>;
  /** Begins one, and gives the connection back without an end. Absent where that is the ORM's to do. */
  abandon?(): Promise<void>;
  end(): Promise<unknown>;
}

type Open = (url: string, max: number) => ByHand | Promise<ByHand>;

/** Commits, or rolls back. */
async function ending<T>(
  running: Promise<T>,
  commit: () => Promise<unknown>,
  rollback: () => Promise<unknown>,
  release?: () => unknown,
): Promise<T> {
  const [answer] = await Promise.allSettled([running]);
  await (answer.status === "fulfilled" ? commit() : rollback());
  await release?.();
  return running;
}

const openPg: Open = (connectionString, max) => {
  const pool = new Pool({ connectionString, max }).on("error", () => {});
  return {
    database: fromPg(pool),
    async own(body, forget) {
      const client = await pool.connect();
      await client.query("BEGIN");
      if (forget) {
        forget(() => client.query("ROLLBACK").then(() => client.release()));
        return body(client);
      }
      return ending(
        body(client),
        () => client.query("COMMIT"),
        () => client.query("ROLLBACK"),
        () => client.release(),
      );
    },
    async first() {
      const client = await pool.connect();
      return async (begins, body) => {
        if (begins) await client.query("BEGIN");
        await body();
        if (!begins) return;
        await client.query("COMMIT");
        client.release();
      };
    },
    async abandon() {
      const client = await pool.connect();
      await client.query("BEGIN");
      client.release();
    },
    end: () => pool.end(),
  };
};

const openMysql2 =
  (statement?: string): Open =>
  (uri, max) => {
    const pool = createPool({ uri, connectionLimit: max });
    return {
      database: fromMysql2(pool),
      async own(body, forget) {
        const connection = await pool.getConnection();
        await (statement ? connection.query(statement) : connection.beginTransaction());
        if (forget) {
          forget(() => connection.rollback().then(() => connection.release()));
          return body(connection);
        }
        return ending(
          body(connection),
          () => (statement ? connection.query("COMMIT") : connection.commit()),
          () => (statement ? connection.query("ROLLBACK") : connection.rollback()),
          () => connection.release(),
        );
      },
      async first() {
        const connection = await pool.getConnection();
        return async (begins, body) => {
          if (begins) await connection.beginTransaction();
          await body();
          if (!begins) return;
          await connection.commit();
          connection.release();
        };
      },
      async abandon() {
        const connection = await pool.getConnection();
        await connection.beginTransaction();
        connection.release();
      },
      end: () => pool.end(),
    };
  };

const openMariadb =
  (statement?: string): Open =>
  (url, max) => {
    const { hostname: host, port, username: user, password, pathname } = new URL(url);
    const pool = createMariadbPool({
      host,
      port: Number(port),
      user,
      password,
      database: pathname.slice(1),
      connectionLimit: max,
      // It does not say how many it can have: so what waits in vain is told only then.
      acquireTimeout: max === 1 ? 3000 : 10_000,
    });
    return {
      database: fromMariadb(pool),
      async own(body, forget) {
        const connection = await pool.getConnection();
        await (statement ? connection.query(statement) : connection.beginTransaction());
        if (forget) {
          forget(() => connection.rollback().then(() => connection.release()));
          return body(connection);
        }
        return ending(
          body(connection),
          () => connection.commit(),
          () => connection.rollback(),
          () => connection.release(),
        );
      },
      async first() {
        const connection = await pool.getConnection();
        return async (begins, body) => {
          if (begins) await connection.beginTransaction();
          await body();
          if (!begins) return;
          await connection.commit();
          await connection.release();
        };
      },
      async abandon() {
        const connection = await pool.getConnection();
        await connection.beginTransaction();
        await connection.release();
      },
      end: () => pool.end(),
    };
  };

const openTypeorm: Open = async (url, max) => {
  const type = url.startsWith("postgres") ? ("postgres" as const) : ("mariadb" as const);
  const source = await new DataSource({ type, url, poolSize: max }).initialize();
  return {
    database: fromTypeorm(source),
    async own(body, forget) {
      const runner = source.createQueryRunner();
      await runner.connect();
      await runner.startTransaction();
      if (forget) {
        forget(() => runner.rollbackTransaction().then(() => runner.release()));
        return body(runner.manager);
      }
      return ending(
        body(runner.manager),
        () => runner.commitTransaction(),
        () => runner.rollbackTransaction(),
        () => runner.release(),
      );
    },
    async first() {
      const runner = source.createQueryRunner();
      await runner.connect();
      return async (begins, body) => {
        if (begins) await runner.startTransaction();
        await body();
        if (!begins) return;
        await runner.commitTransaction();
        await runner.release();
      };
    },
    end: () => source.destroy(),
  };
};

const openSequelize: Open = (url, max) => {
  const sequelize = new Sequelize(url, { pool: { max }, logging: false });
  return {
    database: fromSequelize(sequelize),
    async own(body, forget) {
      await turn();
      const t = await sequelize.transaction();
      if (forget) {
        forget(() => t.rollback());
        return body(t);
      }
      return ending(
        body(t),
        () => t.commit(),
        () => t.rollback(),
      );
    },
    first: async () => async (begins, body) => {
      const t = begins ? await sequelize.transaction() : undefined;
      await body();
      await t?.commit();
    },
    end: () => sequelize.close(),
  };
};

const openKnex: Open = (url, max) => {
  const client = url.startsWith("postgres") ? "pg" : "mysql2";
  const knex = makeKnex({ client, connection: url, pool: { min: 0, max } });
  return {
    database: fromKnex(knex),
    async own(body, forget) {
      await turn();
      const trx = await knex.transaction();
      if (forget) {
        forget(async () => trx.rollback());
        return body(trx);
      }
      return ending(
        body(trx),
        async () => trx.commit(),
        async () => trx.rollback(),
      );
    },
    first: async () => async (begins, body) => {
      const trx = begins ? await knex.transaction() : undefined;
      await body();
      await trx?.commit();
    },
    end: () => knex.destroy(),
  };
};

const openKysely: Open = (url, max) => {
  const pool = url.startsWith("postgres")
    ? new Pool({ connectionString: url, max }).on("error", () => {})
    : undefined;
  const dialect = pool
    ? new PostgresDialect({ pool })
    : new MysqlDialect({ pool: createCallbackPool({ uri: url, connectionLimit: max }) });
  const db = new Kysely<unknown>({ dialect });
  return {
    // It does not give its pool away; that of mysql2 cannot be given to us either.
    database: pool ? fromKysely(db, { pool }) : fromKysely(db),
    hidesPool: !pool,
    async own(body, forget) {
      await turn();
      const trx = await db.startTransaction().setIsolationLevel("read committed").execute();
      if (forget) {
        forget(() => trx.rollback().execute());
        return body(trx);
      }
      return ending(
        body(trx),
        () => trx.commit().execute(),
        () => trx.rollback().execute(),
      );
    },
    first: async () => async (begins, body) => {
      const trx = begins ? await db.startTransaction().execute() : undefined;
      await body();
      await trx?.commit().execute();
    },
    end: () => db.destroy(),
  };
};

const openMikroOrm: Open = async (clientUrl, max) => {
  const options = { clientUrl, pool: { max }, entities: [], discovery: { warnWhenNoEntities: false } };
  const orm = clientUrl.startsWith("postgres")
    ? await MikroORM.init(options)
    : await MikroOrmMysql.init(options);
  return {
    database: fromMikroOrm({ em: orm.em as MikroORM["em"] }),
    async own(body, forget) {
      await turn();
      const em = orm.em.fork();
      await em.begin();
      if (forget) {
        forget(() => em.rollback());
        return body(em);
      }
      return ending(
        body(em),
        () => em.commit(),
        () => em.rollback(),
      );
    },
    first: async () => async (begins, body) => {
      const em = orm.em.fork();
      if (begins) await em.begin();
      await body();
      if (begins) await em.commit();
    },
    end: () => orm.close(),
  };
};

const clientsByHand: Readonly<Record<string, readonly [server: "postgres" | "mariadb", open: Open]>> = {
  pg: ["postgres", openPg],
  "mysql2, beginTransaction()": ["mariadb", openMysql2()],
  "mysql2, START TRANSACTION": ["mariadb", openMysql2("START TRANSACTION")],
  "mariadb, beginTransaction()": ["mariadb", openMariadb()],
  "mariadb, BEGIN": ["mariadb", openMariadb("BEGIN")],
  TypeORM: ["postgres", openTypeorm],
  "TypeORM on MariaDB": ["mariadb", openTypeorm],
  Sequelize: ["postgres", openSequelize],
  "Sequelize on MariaDB": ["mariadb", (url, max) => openSequelize(url.replace("mariadb:", "mysql:"), max)],
  Knex: ["postgres", openKnex],
  "Knex on MariaDB": ["mariadb", openKnex],
  Kysely: ["postgres", openKysely],
  "Kysely on MariaDB": ["mariadb", openKysely],
  MikroORM: ["postgres", openMikroOrm],
  "MikroORM on MariaDB": ["mariadb", openMikroOrm],
};

describe.for(Object.entries(clientsByHand))("begun by hand: %s", ([, [server, open]]) => {
  const missing = unavailable(server);
  let own: TestDatabase;
  beforeAll(async () => {
    if (missing !== undefined) return;
    own = await createDatabase(server);
    const scene = await open(own.url, 4);
    await holdfast(scene.database).migrate();
    await scene.end();
  });
  afterAll(() => own?.drop());

  async function within(
    { max = 8, mode = "error" as "error" | "warn" | "off" },
    work: (hf: Holdfast<never>, scene: ByHand) => Promise<unknown>,
  ): Promise<void> {
    const scene = await open(own.url, max);
    const hf = holdfast(scene.database, { wrongConnection: mode }) as unknown as Holdfast<never>;
    // The first use asks what the server can do.
    await quota(hf, { name: fresh(), limit: 5 }).peek("ada");
    try {
      await work(hf, scene);
    } finally {
      await hf.close();
      await scene.end();
    }
  }

  test("with both places, until its end", async ({ skip }) => {
    skip(missing !== undefined, missing);
    await within({}, async (hf, scene) => {
      const uploads = quota(hf, { name: fresh(), limit: 50 });
      const forgets = async () => {
        const error: unknown = await uploads.consume("ada").catch((thrown: unknown) => thrown);
        expect(error).toBeInstanceOf(WrongConnectionError);
        const { message } = error as Error;
        expect(message.match(/forgotten-transaction\.test\.ts:\d+:\d+/g), message).toHaveLength(2);
        throw new Undo();
      };
      for (let i = 0; i < 2; i++) {
        await expect(scene.own(forgets)).rejects.toThrow(Undo);
        await uploads.consume("ada");
        await scene.own(async (tx) => {
          await uploads.peek("ada", { tx });
          await uploads.consume("bob", 1, { separate: true });
          await hf.outside(() => uploads.consume("bob"));
        });
        await uploads.consume("ada");
      }
      await expect(scene.own(() => hf.transaction(async () => {}))).rejects.toThrow(WrongConnectionError);
      expect((await uploads.peek("ada")).used).toBe(4);
      expect((await uploads.peek("bob")).used).toBe(4);
    });
  });

  test("nobody else's call is reported", async ({ skip }) => {
    skip(missing !== undefined, missing);
    await within({}, async (hf, scene) => {
      const uploads = quota(hf, { name: fresh(), limit: 500 });
      const request = async (i: number) => {
        const use = () => uploads.consume("ada");
        if (i % 3 === 0) await use();
        if (i % 2 === 0)
          await scene.own(async (tx) => {
            await turn();
            await uploads.peek(`${i}`, { tx });
            await turn();
          });
        await use();
        if (i % 3 === 1) await Promise.all([scene.own(async () => turn()), use()]);
        await use();
      };
      await Promise.all(Array.from({ length: 12 }, (_, i) => request(i)));
      // What is begun before anything is waited for is entered by whoever called, too: nothing can be told from that.
      const first = await scene.first();
      const open = Promise.withResolvers<void>();
      const done = Promise.withResolvers<void>();
      const late = async (begins: boolean) => {
        await open.promise;
        await uploads.consume(begins ? "eve" : "bob");
      };
      const rest = async () => {
        await uploads.consume("cy");
        open.resolve();
        await late(true);
        done.resolve();
      };
      await Promise.all([first(true, () => done.promise), first(false, () => late(false)), rest()]);
      await uploads.consume("cy");
    });
  });

  test("one that is never ended is reported once", async ({ skip }) => {
    skip(missing !== undefined, missing);
    await within({}, async (hf, scene) => {
      const uploads = quota(hf, { name: fresh(), limit: 50 });
      let end: (() => Promise<unknown>) | undefined;
      await scene.own(
        async () => {
          await expect(uploads.consume("ada")).rejects.toThrow(WrongConnectionError);
          for (let i = 0; i < 3; i++) await uploads.consume("ada");
        },
        (ends) => (end = ends),
      );
      await uploads.consume("ada");
      await end?.();
      await scene.abandon?.();
      // It may get the connection that is still inside of that transaction.
      const error: unknown = await uploads.consume("ada").catch((thrown: unknown) => thrown);
      expect(error).not.toBeInstanceOf(WrongConnectionError);
    });
  });

  test("a pool of one: is told, and does not wait for itself for ever", async ({ skip }) => {
    skip(missing !== undefined, missing);
    await within({ max: 1, mode: "off" }, async (hf, scene) => {
      if (scene.hidesPool) return;
      const uploads = quota(hf, { name: fresh(), limit: 5 });
      await uploads.peek("ada");
      await expect(scene.own(() => uploads.consume("ada"))).rejects.toThrow(PoolExhaustedError);
      await expect(scene.own(() => uploads.peek("ada", { separate: true }))).rejects.toThrow(
        PoolExhaustedError,
      );
      await expect(scene.own(() => hf.transaction(async () => {}))).rejects.toThrow(PoolExhaustedError);
      await scene.own((tx) => uploads.consume("ada", 1, { tx }));
      expect((await uploads.peek("ada")).used).toBe(1);
    });
  });
});
