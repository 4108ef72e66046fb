/** Addresses with passwords that hold what means something else in a URL. */
import { randomBytes } from "node:crypto";
import { Client } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

const password = "open#se?sa/me@of%all:the";
const user = `url_${randomBytes(6).toString("hex")}`;
let database: TestDatabase;
let admin: Client;

beforeAll(async () => {
  database = await createDatabase("postgres");
  admin = new Client({ connectionString: database.url });
  await admin.connect();
  await admin.query(`CREATE ROLE ${user} LOGIN PASSWORD '${password}'`);
});

afterAll(async () => {
  await admin?.query(`DROP ROLE ${user}`);
  await admin?.end();
  await database?.drop();
});

const withPassword = (typed: string, name = user) =>
  `postgres://${name}:${typed}@${new URL(database.url).host}/${database.name}`;

test("percent-encoded, they log in", async () => {
  const { code, err } = await command(["locks", "--url", withPassword(encodeURIComponent(password))]);
  expect([code, err]).toEqual([0, ""]);
});

describe("as they are, it says what to write in place of which character, and not the password", () => {
  test.each([
    ["#", "open#sesame", "# is %23"],
    ["#", "123#sesame", "# is %23"],
    ["?", "open?sesame", "? is %3F"],
    ["?", "123?sesame", "? is %3F"],
    ["/", "open/sesame", "/ is %2F"],
    ["/", "123/sesame", "/ is %2F"],
    ["@", "open@sesam/mine", "@ is %40, / is %2F"],
    ["%", "open%sesame", "% is %25"],
  ])("%s in %s", async (_, typed, says) => {
    for (const [args, env, by] of [
      [["locks", "--url", withPassword(typed)], {}, "--url"],
      [["doctor"], { DATABASE_URL: withPassword(typed) }, "DATABASE_URL"],
    ] as const) {
      const { code, out, err } = await command(args, { env });
      expect([code, out]).toEqual([2, ""]);
      expect(err).toMatch(/^holdfast: .+\n$/);
      expect(err).toContain(`password in ${by}`);
      expect(err).toContain("percent-encode");
      expect(err).toContain(says);
      for (const part of typed.split(/[#?/@%]/)) expect(err).not.toContain(part);
    }
  });

  test("an @ alone is not taken for the end", async () => {
    const name = `${user}_at`;
    await admin.query(`CREATE ROLE ${name} LOGIN PASSWORD 'open@sesame'`);
    try {
      const { code, err } = await command(["locks", "--url", withPassword("open@sesame", name)]);
      expect([code, err]).toEqual([0, ""]);
    } finally {
      await admin.query(`DROP ROLE ${name}`);
    }
  });
});
