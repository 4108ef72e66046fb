/** Older majors of ORMs: where they differ from those that the other tests run. Conformance runs them too. */
import { holdfast as instance, key } from "holdfast";
import { fromPrisma, holdfast } from "holdfast/prisma";
import { fromSequelize } from "holdfast/sequelize";
import { fromTypeorm } from "holdfast/typeorm";
import { Client } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { prisma6, typeorm03 } from "../../older/clients.ts";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";

const missing = unavailable("postgres");
let database: TestDatabase;
let client: Client;

beforeAll(async () => {
  if (missing !== undefined) return;
  database = await createDatabase("postgres");
  client = new Client({ connectionString: database.url });
  await client.connect();
  await client.query(
    "CREATE SCHEMA shop; CREATE TABLE shop.product (id int PRIMARY KEY, name text, stock int)",
  );
  // Another one of the same name, where a statement without a schema would look.
  await client.query("CREATE TABLE product (id int PRIMARY KEY, name text, stock int)");
});

beforeEach(async ({ skip }) => {
  skip(missing !== undefined, missing);
  await client.query("TRUNCATE shop.product; INSERT INTO shop.product VALUES (1, 'cap', 10)");
});

afterAll(async () => {
  if (missing !== undefined) return;
  await client.end();
  await database.drop();
});

describe("Prisma 6", () => {
  test("finds and locks rows of a model in a schema of its own", async () => {
    const prisma = prisma6(database.url).$extends(holdfast());
    try {
      const buy = () =>
        prisma.$exact({}, async (tx) => {
          const product = await tx.product.findUniqueForUpdate({ where: { id: 1 } });
          if (product === null || product.stock === 0) return false;
          await tx.product.update({ where: { id: 1 }, data: { stock: product.stock - 1 } });
          return true;
        });
      const sold = await Promise.all(Array.from({ length: 25 }, buy));
      expect(sold.filter(Boolean)).toHaveLength(10);
      const { rows } = await client.query("SELECT stock FROM shop.product");
      expect(rows).toEqual([{ stock: 0 }]);
    } finally {
      await prisma.$disconnect();
    }
  });

  const like = (told: object) => ({ $transaction() {}, $queryRawUnsafe: async () => {}, ...told }) as never;
  const adapter = {};

  test.each([
    [{ _clientVersion: "5.22.0" }, "this is Prisma 5.22.0; Holdfast needs Prisma 6 or newer"],
    [{ _clientVersion: "6.2.1", _engineConfig: {} }, "without a driver adapter"],
    [
      { _clientVersion: "6.19.3", _engineConfig: { adapter }, _activeProvider: "mysql" },
      "on MySQL and MariaDB Holdfast needs Prisma 7",
    ],
  ])("what it was not tried with is refused: %j", (told, why) => {
    expect(() => fromPrisma(like(told))).toThrow(
      expect.objectContaining({ code: "HF_UNSUPPORTED", message: expect.stringContaining(why) }),
    );
  });
});

describe("TypeORM 0.3", () => {
  test("joins its transactions, and locks what its queries find", async () => {
    const dataSource = await typeorm03({ type: "postgres", url: database.url, poolSize: 10 }).initialize();
    const hf = instance(fromTypeorm(dataSource));
    try {
      const buy = (how: "join" | "rows") =>
        how === "join"
          ? dataSource.transaction(async (manager) => {
              await hf.join(manager).lock(key("product", 1));
              return sell(manager);
            })
          : hf.transaction({ lock: key("product", 1) }, async (tx) => {
              const query = tx.client
                .createQueryBuilder()
                .select("p.stock", "stock")
                .from("shop.product", "p");
              const found = (await tx.rows(query as never)) as unknown as { stock: number }[];
              expect(found).toHaveLength(1);
              return sell(tx.client);
            });
      const sell = async (manager: { query(text: string): Promise<unknown> }) => {
        const [row] = (await manager.query("SELECT stock FROM shop.product")) as { stock: number }[];
        if (row === undefined || row.stock === 0) return false;
        await manager.query(`UPDATE shop.product SET stock = ${row.stock - 1}`);
        return true;
      };
      const sold = await Promise.all(
        Array.from({ length: 25 }, (_, i) => buy(i % 2 === 0 ? "join" : "rows")),
      );
      expect(sold.filter(Boolean)).toHaveLength(10);
      expect(() => hf.join(dataSource.manager)).toThrow("this is the DataSource's own manager");
    } finally {
      await hf.close();
      await dataSource.destroy();
    }
  });
});

test("Sequelize 5 is refused", () => {
  class Sequelize {
    static readonly version = "5.22.5";
    readonly connectionManager = {};
    transaction() {}
    getDialect() {
      return "postgres";
    }
  }
  expect(() => fromSequelize(new Sequelize())).toThrow("needs Sequelize 6 or newer, and this is 5.22.5");
});
