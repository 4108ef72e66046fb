/** A quota, stock and a queue in each ORM's own transactions: examples/<orm>/orders.ts. */
import { beforeEach, expect, test } from "vitest";
import { demo } from "../../examples/orders.ts";
import { createDatabase, unavailable } from "../harness/databases.ts";

const missing = unavailable("postgres");
beforeEach(({ skip }) => skip(missing !== undefined, missing));

test.each(["prisma", "drizzle", "kysely", "knex", "typeorm", "mikro-orm", "sequelize"])("%s", async (orm) => {
  const { open } = (await import(`../../examples/${orm}/orders.ts`)) as { open: Parameters<typeof demo>[1] };
  const database = await createDatabase("postgres");
  try {
    expect(await demo(database.url, open)).toEqual({
      sold: 10,
      refused: 10,
      counted: 10,
      left: 0,
      receipts: 10,
    });
  } finally {
    await database.drop();
  }
});
