/**
 * A locked check-then-write inside each ORM's own transaction: through Holdfast, and by hand with the same lock timeout,
 * as the documentation of PostgreSQL and of the ORM have it. Both run the very same read and write of the ORM.
 */
import { startPostgres } from "@holdfast/cli";
import { MikroORM, defineEntity, sql as mikroSql } from "@mikro-orm/postgresql";
import { PrismaPg } from "@prisma/adapter-pg";
import { eq, sql as drizzleSql, sum } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { bigint, integer, pgTable, text } from "drizzle-orm/pg-core";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { fromKnex } from "holdfast/knex";
import { fromKysely } from "holdfast/kysely";
import { fromMikroOrm } from "holdfast/mikro-orm";
import { fromPrisma } from "holdfast/prisma";
import { fromSequelize } from "holdfast/sequelize";
import { fromTypeorm } from "holdfast/typeorm";
import makeKnex from "knex";
import { type Generated, Kysely, PostgresDialect, sql as kyselySql } from "kysely";
import { Pool } from "pg";
import { DataTypes, Sequelize } from "sequelize";
import { DataSource, EntitySchema } from "typeorm";
import { PrismaClient } from "../../../examples/prisma/generated/client.ts";
import { alternate, scatter } from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";

const callers = 4;
const users = 1000;
const historyPerUser = 10;
const bytes = 1000;
/** Never reached: every operation writes, so all contestants do the same work. */
const quota = 1_000_000_000;

/** One ORM, and the same operation in it in two ways. */
interface Ground {
  readonly name: string;
  /** The name of its ratio. */
  readonly ratio: string;
  ours(user: string): Promise<void>;
  byHand(user: string): Promise<void>;
  close(): Promise<void>;
}

class QuotaExceeded extends Error {}

function check(used: unknown): void {
  if (Number(used) + bytes > quota) throw new QuotaExceeded();
}

/** Through Holdfast: the body is the ORM's, whatever it is. */
function locked<Native>(hf: Holdfast<Native>, body: (client: Native, user: string) => Promise<void>) {
  return (user: string) =>
    hf.transaction({ lock: key("upload", user), wait: 5000 }, (tx) => body(tx.client, user));
}

const name = (user: string) => `upload:${user}`;

async function prismaGround(connectionString: string): Promise<Ground> {
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString, max: callers }) });
  type Tx = Parameters<Parameters<typeof prisma.$transaction>[0]>[0];
  const work = async (tx: Tx, userId: string) => {
    const { _sum } = await tx.userImage.aggregate({ where: { userId }, _sum: { bytes: true } });
    check(_sum.bytes);
    await tx.userImage.create({ data: { userId, bytes } });
  };
  const hf = holdfast(fromPrisma(prisma));
  return {
    name: "Prisma",
    ratio: "prisma",
    ours: locked(hf, work),
    byHand: (user) =>
      prisma.$transaction(async (tx) => {
        await tx.$executeRaw`SET LOCAL lock_timeout = '5s'`;
        await tx.$executeRaw`SELECT pg_advisory_xact_lock(hashtextextended(${name(user)}, 0))`;
        await work(tx, user);
      }),
    close: () => prisma.$disconnect(),
  };
}

const userImage = pgTable("user_image", {
  id: bigint({ mode: "bigint" }).primaryKey().generatedAlwaysAsIdentity(),
  userId: text("user_id").notNull(),
  bytes: integer().notNull(),
});

async function drizzleGround(connectionString: string): Promise<Ground> {
  const pool = new Pool({ connectionString, max: callers });
  const db = drizzle(pool);
  type Tx = Parameters<Parameters<typeof db.transaction>[0]>[0];
  const work = async (tx: Tx, userId: string) => {
    const [row] = await tx
      .select({ used: sum(userImage.bytes) })
      .from(userImage)
      .where(eq(userImage.userId, userId));
    check(row?.used);
    await tx.insert(userImage).values({ userId, bytes });
  };
  return {
    name: "Drizzle",
    ratio: "drizzle",
    ours: locked(holdfast(fromDrizzle(db)), work),
    byHand: (user) =>
      db.transaction(async (tx) => {
        await tx.execute(drizzleSql`SET LOCAL lock_timeout = '5s'`);
        await tx.execute(drizzleSql`SELECT pg_advisory_xact_lock(hashtextextended(${name(user)}, 0))`);
        await work(tx, user);
      }),
    close: () => pool.end(),
  };
}

interface Tables {
  user_image: { id: Generated<string>; user_id: string; bytes: number };
}

async function kyselyGround(connectionString: string): Promise<Ground> {
  const pool = new Pool({ connectionString, max: callers });
  const db = new Kysely<Tables>({ dialect: new PostgresDialect({ pool }) });
  const work = async (trx: Kysely<Tables>, user: string) => {
    const { used } = await trx
      .selectFrom("user_image")
      .select((eb) => eb.fn.sum<string | null>("bytes").as("used"))
      .where("user_id", "=", user)
      .executeTakeFirstOrThrow();
    check(used);
    await trx.insertInto("user_image").values({ user_id: user, bytes }).execute();
  };
  return {
    name: "Kysely",
    ratio: "kysely",
    ours: locked(holdfast(fromKysely(db, { pool })), work),
    byHand: (user) =>
      db.transaction().execute(async (trx) => {
        await kyselySql`SET LOCAL lock_timeout = '5s'`.execute(trx);
        await kyselySql`SELECT pg_advisory_xact_lock(hashtextextended(${name(user)}, 0))`.execute(trx);
        await work(trx, user);
      }),
    close: () => db.destroy(),
  };
}

async function knexGround(connection: string): Promise<Ground> {
  const knex = makeKnex({ client: "pg", connection, pool: { min: 0, max: callers } });
  type Trx = Parameters<Parameters<typeof knex.transaction>[0]>[0];
  const work = async (trx: Trx, user: string) => {
    const found = await trx("user_image").where({ user_id: user }).sum({ used: "bytes" }).first();
    check(found?.["used"]);
    await trx("user_image").insert({ user_id: user, bytes });
  };
  return {
    name: "Knex",
    ratio: "knex",
    ours: locked(holdfast(fromKnex(knex)), work as never),
    byHand: (user) =>
      knex.transaction(async (trx) => {
        await trx.raw("SET LOCAL lock_timeout = '5s'");
        await trx.raw("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", [name(user)]);
        await work(trx, user);
      }),
    close: () => knex.destroy(),
  };
}

const Image = new EntitySchema<{ id: string; userId: string; bytes: number }>({
  name: "Image",
  tableName: "user_image",
  columns: {
    id: { type: "bigint", primary: true, generated: "increment" },
    userId: { name: "user_id", type: "text" },
    bytes: { type: "integer" },
  },
});

async function typeormGround(url: string): Promise<Ground> {
  const dataSource = new DataSource({ type: "postgres", url, entities: [Image], poolSize: callers });
  await dataSource.initialize();
  const work = async (manager: DataSource["manager"], userId: string) => {
    check((await manager.sum(Image, "bytes", { userId })) ?? 0);
    await manager.insert(Image, { userId, bytes });
  };
  return {
    name: "TypeORM",
    ratio: "typeorm",
    ours: locked(holdfast(fromTypeorm(dataSource)), work),
    byHand: (user) =>
      dataSource.transaction(async (manager) => {
        await manager.query("SET LOCAL lock_timeout = '5s'");
        await manager.query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", [name(user)]);
        await work(manager, user);
      }),
    close: () => dataSource.destroy(),
  };
}

const UserImage = defineEntity({
  name: "UserImage",
  tableName: "user_image",
  properties: (p) => ({ id: p.bigint().primary(), userId: p.text(), bytes: p.integer() }),
});

async function mikroOrmGround(clientUrl: string): Promise<Ground> {
  const orm = await MikroORM.init({ clientUrl, entities: [UserImage], pool: { max: callers } });
  const work = async (em: typeof orm.em, userId: string) => {
    const { used } = await em
      .qb(UserImage)
      .select(mikroSql`sum(bytes)`.as("used"))
      .where({ userId })
      .execute<{ used: string | null }>("get");
    check(used);
    em.create(UserImage, { userId, bytes });
  };
  return {
    name: "MikroORM",
    ratio: "mikro_orm",
    ours: locked(holdfast(fromMikroOrm(orm)), work),
    byHand: (user) =>
      orm.em.fork().transactional(async (em) => {
        await em.execute("SET LOCAL lock_timeout = '5s'");
        await em.execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", [name(user)]);
        await work(em, user);
      }),
    close: () => orm.close(),
  };
}

async function sequelizeGround(url: string): Promise<Ground> {
  const sequelize = new Sequelize(url, { logging: false, pool: { max: callers } });
  const images = sequelize.define(
    "user_image",
    {
      id: { type: DataTypes.BIGINT, primaryKey: true, autoIncrement: true },
      userId: { type: DataTypes.TEXT, allowNull: false },
      bytes: { type: DataTypes.INTEGER, allowNull: false },
    },
    { tableName: "user_image", underscored: true, timestamps: false },
  );
  type Transaction = Awaited<ReturnType<typeof sequelize.transaction>>;
  const work = async (transaction: Transaction, userId: string) => {
    check(await images.sum("bytes", { where: { userId }, transaction }));
    await images.create({ userId, bytes }, { transaction });
  };
  return {
    name: "Sequelize",
    ratio: "sequelize",
    ours: locked(holdfast(fromSequelize(sequelize)), work as never),
    byHand: (user) =>
      sequelize.transaction(async (transaction) => {
        await sequelize.query("SET LOCAL lock_timeout = '5s'", { transaction });
        await sequelize.query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", {
          bind: [name(user)],
          transaction,
        });
        await work(transaction, user);
      }),
    close: () => sequelize.close(),
  };
}

const grounds: readonly ((url: string) => Promise<Ground>)[] = [
  prismaGround,
  drizzleGround,
  kyselyGround,
  knexGround,
  typeormGround,
  mikroOrmGround,
  sequelizeGround,
];

export async function run({ seconds, note }: SuiteOptions): Promise<Report> {
  const server = await startPostgres();
  const admin = new Pool({ connectionString: server.url(), max: 1 });
  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  try {
    await admin.query(`CREATE TABLE user_image (
      id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, user_id text NOT NULL, bytes integer NOT NULL)`);
    await admin.query("CREATE INDEX ON user_image (user_id)");
    const version = await admin.query<{ server_version: string }>("SHOW server_version");
    for (const make of grounds) {
      const ground = await make(server.url());
      try {
        note(`${ground.name} …`);
        const userOf = (turn: number): string => String(1 + Math.floor(scatter(turn) * users));
        const measured = await alternate({
          contestants: [
            { name: "holdfast", call: (turn) => ground.ours(userOf(turn)) },
            { name: "by hand", call: (turn) => ground.byHand(userOf(turn)) },
          ],
          callers,
          seconds,
          async reset() {
            await admin.query("TRUNCATE user_image");
            await admin.query(
              "INSERT INTO user_image (user_id, bytes) SELECT (1 + i % $1::int)::text, $2::int FROM generate_series(1, $1::int * $3::int) i",
              [users, bytes, historyPerUser],
            );
            await admin.query("VACUUM ANALYZE user_image");
          },
        });
        for (const { name: contestant, ...figures } of measured)
          rows.push({ cell: ground.name, contestant, ...figures });
        const [ours, byHand] = measured.map(({ opsPerSecond }) => opsPerSecond);
        ratios[ground.ratio] = Number(((ours ?? Number.NaN) / (byHand ?? Number.NaN)).toFixed(3));
      } finally {
        await ground.close();
      }
    }
    return {
      suite: "orms",
      machine: machine(version.rows[0]?.server_version ?? "unknown"),
      rows,
      ratios,
      notes: [
        `${callers} callers, ${users} users, ${historyPerUser} images each; lock timeout 5 s on both sides`,
      ],
    };
  } finally {
    await admin.end();
    await server.stop();
  }
}
