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

describe("nothing is shown of an address that is not understood, wherever it stands", () => {
  const forms = [
    "app:hunter2@host/db",
    "//app:hunter2@host/db",
    "app:hunt%65r2@host/db",
    "postgres:app:hunter2@host/db",
    "mysql:/app:hunter2@host/db",
    "postgres://app:hunter2@127.0.0.1:1,127.0.0.2:1/db",
    "postgres://app:hunter2@127.0.0.1:99999/db",
    "postgres://app:hunter2@[::1/db",
    "postgres://127.0.0.1:1/db?user=app&password=hunter2",
    "postgres://127.0.0.1:1/db?user=app&password=hunter2@x",
    "redis://app:hunter2@host/db",
    "jdbc:postgresql://host/db?password=hunter2",
    "host=127.0.0.1 user=app password=hunter2",
    "password = hunter2",
    "file:nowhere.db?authToken=hunter2",
    "file://app:hunter2@host/db",
    "sqlite://app:hunter2@host/db",
    "hunter2",
  ];
  test.each(forms)("%s", async (address) => {
    const told = await Promise.all([
      command(["locks", "--url", address]),
      command(["doctor", "--json"], { env: { DATABASE_URL: address } }),
      command(["doctor", "--json"], { env: { DATABASE_URL: address, DEBUG: "1" } }),
    ]);
    for (const { code, out, err } of told) {
      expect(code).toBe(2);
      expect(err).toContain("holdfast: ");
      expect(`${out}${err}`).not.toMatch(/hunter2|hunt%65r2/);
    }
  });

  test.each([
    ["unknown option '--urll=…'", ["locks", "--json", "--urll=postgres://app:hunter2@host/db"]],
    ["unknown command '…'", ["postgres://app:hunter2@host/db"]],
    ["too many arguments", ["locks", "app:hunter2@host/db"]],
    ["too many arguments", ["locks", "password=hunter2"]],
  ])("%s", async (says, args) => {
    const { code, out, err } = await command(args);
    expect(code).toBe(2);
    expect(err).toContain(says);
    expect(`${out}${err}`).not.toContain("hunter2");
  });

  test.each(["kill", "bench", "race", "order", "queue show", "lease end", "doctor --only", "certify --only"])(
    "%s, which takes something else",
    async (verb) => {
      const address = "postgres://app:hunter2@127.0.0.1:1/db?password=hunter2";
      for (const more of [[], ["--json"]]) {
        const args = [...verb.split(" "), address, ...more];
        const { out, err } = await command(args, { env: { DATABASE_URL: database.url } });
        expect(`${out}${err}`).not.toContain("hunter2");
        expect(err).not.toBe("");
      }
    },
  );

  test.each([
    ["app:secret@host/db", "does not begin with a scheme"],
    ["host=h password=p", "consists of keywords and values"],
    ["redis://host", "begins with redis://"],
    ["postgres:db", 'has no "//" after postgres:'],
    ["postgres://app:p@a,b/db", "postgres://app@a,b/db (--url) names several hosts"],
  ])("it says what is wrong with %s", async (address, says) => {
    expect((await command(["locks", "--url", address])).err).toContain(says);
  });
});
