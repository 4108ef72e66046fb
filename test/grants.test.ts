/** `holdfast migrate grants`: what it prints is enough for every call, and not for more; and one error names all that is missing. */
import { randomBytes } from "node:crypto";
import { type AccessDeniedError, type Holdfast, type Key, holdfast, key, once } from "holdfast";
import { fromCitus } from "holdfast/citus";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import mysql from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterEach, describe, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { useAll, useLocks } from "./harness/every-call.ts";

const ends: (() => unknown)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).toReversed()) await end();
});

/** Everything that ends a name, a text or a line somewhere. */
const odd = () => `o'd"d\`r\\;\n--${randomBytes(3).toString("hex")}é`;

const withLogin = (url: string, user: string) => {
  const address = new URL(url);
  [address.username, address.password] = [encodeURIComponent(user), "pw"];
  return address.href;
};

interface Place {
  /** Of an administrator. */
  readonly admin: string;
  /** Of the role. */
  readonly url: string;
  readonly role: string;
  ask(text: string): Promise<unknown>;
  instance(url: string): Holdfast<any>;
}

/** Closes both after the test. */
function closedLater<H extends Holdfast<any>>(hf: H, pool: { end(): Promise<unknown> }): H {
  ends.push(async () => {
    await hf.close();
    await pool.end();
  });
  return hf;
}

const quotedPg = (name: string) => `"${name.replaceAll('"', '""')}"`;

async function postgresPlace(url: string, of = (pool: Pool) => fromPg(pool)): Promise<Place> {
  const role = odd();
  const admin = new Client({ connectionString: url });
  await admin.connect();
  ends.push(() => admin.end());
  await admin.query(`CREATE ROLE ${quotedPg(role)} LOGIN PASSWORD 'pw'`);
  ends.push(async () => {
    await admin.query(`DROP OWNED BY ${quotedPg(role)}`);
    await admin.query(`DROP ROLE ${quotedPg(role)}`);
  });
  const instance = (address: string) => {
    const pool = new Pool({ connectionString: address, max: 6 });
    return closedLater(holdfast(of(pool)), pool);
  };
  await admin.query("CREATE TABLE account (id int PRIMARY KEY, n int NOT NULL)");
  await admin.query("INSERT INTO account VALUES (1, 1)");
  await admin.query(`GRANT SELECT, UPDATE ON account TO ${quotedPg(role)}`);
  return { admin: url, url: withLogin(url, role), role, ask: (text) => admin.query(text), instance };
}

async function mysqlPlace(server: "mysql" | "mariadb"): Promise<Place> {
  const { url, drop } = await createDatabase(server);
  ends.push(drop);
  const role = odd();
  const user = `\`${role.replaceAll("`", "``")}\``;
  const admin = await mysql.createConnection({ uri: url, multipleStatements: true });
  ends.push(() => admin.end());
  await admin.query(`CREATE USER ${user} IDENTIFIED BY 'pw'`);
  ends.push(() => admin.query(`DROP USER ${user}`));
  const instance = (address: string) => {
    const pool = mysql.createPool(address);
    return closedLater(holdfast(fromMysql2(pool)), pool);
  };
  await admin.query("CREATE TABLE account (id int PRIMARY KEY, n int NOT NULL)");
  await admin.query("INSERT INTO account VALUES (1, 1)");
  await admin.query(`GRANT SELECT, UPDATE ON account TO ${user}`);
  return { admin: url, url: withLogin(url, role), role, ask: (text) => admin.query(text), instance };
}

const printed = async (engine: string, role: string, ...more: readonly string[]) => {
  const { code, out, err } = await command([
    "migrate",
    "grants",
    "--engine",
    engine,
    ...more,
    `--role=${role}`,
  ]);
  expect(err).toBe("");
  expect(code).toBe(0);
  return out;
};

const verbs = [
  "migrate status",
  "doctor --json",
  "locks",
  "quota show uploads",
  "stock history CAP",
  "queue jobs emails",
  "schedule",
  "lease",
  "strategy",
  "audit",
  "exec --lock deploy -- true",
];

/** With the rights that were printed. */
async function works(place: Place, advisory: readonly Key[] | null = []): Promise<void> {
  const hf = place.instance(place.url);
  if (advisory) await useLocks(hf, advisory);
  await useAll(hf, "mine");
  await hf.transaction(async (tx) => {
    await tx.rows("account", [1]);
    await tx.lock(key("account", 1));
  });
  await quota(hf, { name: "uploads", limit: 5 }).consume("ada", 1);
  await stock(hf).increase("CAP", 1);
  await queue(hf, "emails").enqueue({ to: "ada" });
}

async function verbsWork(place: Place, skipped: readonly string[] = []): Promise<void> {
  const left = verbs.filter((line) => !skipped.some((start) => line.startsWith(start)));
  const one = async () => {
    for (let line = left.shift(); line; line = left.shift()) {
      const { code, out, err } = await command(line.split(" "), { env: { HOLDFAST_URL: place.url } });
      expect(code === 0 || code === 1, `${line}: ${code} ${err}`).toBe(true);
      expect(err).not.toMatch(/permission denied|command denied|may not|lacks/);
      if (line.startsWith("doctor"))
        expect(out).not.toMatch(/permission denied for|command denied to user .*holdfast_/);
    }
  };
  await Promise.all([one(), one()]);
}

/** Nothing is granted: the first call of each says all. */
async function lacksAll(hf: Holdfast<any>, tables: readonly string[]): Promise<AccessDeniedError> {
  const calls: Record<string, () => Promise<unknown>> = {
    quota: () => quota(hf, { name: "q", limit: 1 }).consume("ada"),
    "quota in a transaction": () =>
      hf.transaction((tx) => quota(hf, { name: "q", limit: 1 }).consume("ada", 1, { tx })),
    stock: () => stock(hf).increase("CAP", 1),
    queue: () => queue(hf, "q").enqueue({}),
    lease: () => hf.lease(key("a")),
    once: () => once(hf, ["a"], async () => 1),
  };
  let last: unknown;
  for (const [name, call] of Object.entries(calls)) {
    last = await call().then(
      () => expect.unreachable(name),
      (error: unknown) => error,
    );
    expect(last, name).toMatchObject({ code: "HF_ACCESS_DENIED" });
    const { lacking, message } = last as AccessDeniedError;
    for (const table of tables) expect(lacking.join("\n"), name).toContain(table);
    for (const each of lacking) expect(message, name).toContain(each);
    expect(message).toContain("holdfast migrate grants --role");
  }
  return last as AccessDeniedError;
}

const some = ["lease", "once", "quota_bucket", "stock_movement", "queue_ready", "schedule_run", "audit"];

describe.for(["postgres", "postgresOld"] as const)("%s", (server) => {
  test(
    "all that is missing, then every call with what is printed",
    { timeout: 240_000 },
    async ({ skip }) => {
      const why = unavailable(server);
      skip(why !== undefined, why);
      const { url, drop } = await createDatabase(server);
      ends.push(drop);
      const place = await postgresPlace(url);
      // As careful people have it.
      await place.ask("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC");
      await place.instance(place.admin).migrate();
      const hf = place.instance(place.url);
      // It needs no table, but whether this database is one of several.
      await expect(hf.transaction({ lock: key("a") }, async () => 1)).rejects.toMatchObject({
        code: "HF_ACCESS_DENIED",
      });
      const { lacking } = await lacksAll(
        hf,
        some.map((name) => `holdfast.${name}`),
      );
      expect(lacking[0]).toMatch(/^USAGE on the schema holdfast, /);
      const sql = await printed("postgres", place.role);
      await place.ask(sql);
      await works(place, [key.bigint(7n)]);
      expect(await place.instance(place.url).migrations()).not.toContainEqual(
        expect.objectContaining({ state: "missing" }),
      );
      if (server === "postgres") await verbsWork(place);
      // What is missing now is one thing.
      await place.ask(`REVOKE INSERT ON holdfast.stock_movement FROM ${quotedPg(place.role)}`);
      await expect(stock(hf).increase("CAP", 1)).rejects.toMatchObject({
        code: "HF_ACCESS_DENIED",
        lacking: ["INSERT on holdfast.stock_movement"],
      });
      const told = await command(["stock", "add", "CAP", "1", "--yes"], { env: { HOLDFAST_URL: place.url } });
      expect(told.code).toBe(2);
      expect(told.err).toContain("INSERT on holdfast.stock_movement");
      await place.ask(sql);
      // It may not change the schema.
      const client = new Client({ connectionString: place.url });
      await client.connect();
      ends.push(() => client.end());
      for (const text of [
        "CREATE TABLE holdfast.mine ()",
        "DROP TABLE holdfast.lease",
        "TRUNCATE holdfast.lease",
        "UPDATE holdfast.migration SET name = name",
        "DELETE FROM holdfast.quota_bucket",
      ])
        await expect(client.query(text), text).rejects.toMatchObject({ code: "42501" });
    },
  );
});

test("PostgreSQL: the stores of Citus", { timeout: 240_000 }, async () => {
  const { url, drop } = await createDatabase("postgres");
  ends.push(drop);
  const place = await postgresPlace(url, (pool) => fromCitus(fromPg(pool)));
  await place.instance(place.admin).migrate();
  await place.ask(place.instance(place.admin).grantSql({ role: place.role }));
  await works(place, null);
});

describe.for(["mysql", "mariadb"] as const)("%s", (server) => {
  test(
    "all that is missing, then every call with what is printed",
    { timeout: 240_000 },
    async ({ skip }) => {
      const why = unavailable(server);
      skip(why !== undefined, why);
      const place = await mysqlPlace(server);
      await place.instance(place.admin).migrate();
      const hf = place.instance(place.url);
      await lacksAll(
        hf,
        some.map((name) => `holdfast_${name}`),
      );
      const sql = await printed(server, place.role);
      await place.ask(sql);
      await works(place);
      // To see locks takes rights to the server: PROCESS, and performance_schema.
      await verbsWork(place, ["strategy", "locks"]);
      const user = `\`${place.role.replaceAll("`", "``")}\``;
      await place.ask(`REVOKE INSERT ON holdfast_stock_movement FROM ${user}`);
      await place.ask(`REVOKE DELETE ON holdfast_lease FROM ${user}`);
      await expect(stock(hf).increase("CAP", 1)).rejects.toMatchObject({
        code: "HF_ACCESS_DENIED",
        lacking: ["INSERT on holdfast_stock_movement", "DELETE on holdfast_lease"],
      });
      const connection = await mysql.createConnection(place.url);
      ends.push(() => connection.end());
      for (const text of [
        "CREATE TABLE holdfast_mine (id int)",
        "DROP TABLE holdfast_lease",
        "UPDATE holdfast_migration SET name = name",
        "DELETE FROM holdfast_quota_bucket",
      ])
        await expect(connection.query(text), text).rejects.toMatchObject({ errno: 1142 });
    },
  );
});

test("a role, a user and a host, as they are written", async () => {
  expect(await printed("mysql", "app@10.0.0.%")).toContain("ON holdfast_lease TO `app`@`10.0.0.%`;");
  expect(await printed("mariadb", "app")).toContain("ON holdfast_lease TO `app`;");
  expect(await printed("postgres", "app", "--schema", "my app")).toContain(
    'GRANT USAGE ON SCHEMA "my app" TO "app";',
  );
  const places = await printed("postgres", "app", "--citus", "--places", "2");
  expect(places.match(/GRANT USAGE ON SCHEMA .*/g)).toHaveLength(2);
});

test("refused: no roles, or no name of one", async () => {
  const told = async (...args: readonly string[]) => {
    const { code, out, err } = await command(["migrate", "grants", ...args]);
    expect(code).toBe(2);
    expect(out).toBe("");
    return err;
  };
  expect(await told("--engine", "sqlite", "--role", "app")).toContain("SQLite has no roles");
  expect(await told("--engine", "duckdb", "--role", "app")).toContain("DuckDB has no roles");
  expect(await told("--url", "file:app.db", "--role", "app")).toContain("SQLite has no roles");
  expect(await told("--engine", "postgres")).toContain("--role");
  expect(await told("--engine", "postgres", "--role", "")).toContain("name of a role");
  expect(await told("--engine", "postgres", "--role", "public")).toContain("everybody");
  expect(await told("--engine", "postgres", "--role", "r".repeat(64))).toContain("63 bytes");
  expect(await told("--engine", "postgres", "--role", "app", "--places", "2")).toContain("--citus");
  expect(await told("--engine", "mysql", "--role", "app", "--citus")).toContain("PostgreSQL");
});

/** Each kind of statement, and the privilege that it takes. */
const taking = {
  "INSERT INTO": "INSERT",
  UPDATE: "UPDATE",
  "DELETE FROM": "DELETE",
  FROM: "SELECT",
  JOIN: "SELECT",
};

test("every statement of a routine has its privilege", async () => {
  const { out: text } = await command(["migrate", "print", "--engine", "postgres", "--only", "routines"]);
  const granted = new Set<string>();
  for (const [, privileges = "", tables = ""] of (await printed("postgres", "app")).matchAll(
    /^GRANT (.*) ON (?:SEQUENCE )?(holdfast\..*) TO "app";$/gm,
  ))
    for (const table of tables.split(", "))
      for (const each of privileges.split(", ")) granted.add(`${each} ${table}`);
  const tables = new Set([...granted].map((each) => each.split(" ")[1]));
  expect(tables.size).toBeGreaterThan(25);
  const needed = new Set<string>();
  for (const [words, privilege] of Object.entries(taking))
    for (const [, table = ""] of text.matchAll(new RegExp(`\\b${words} (holdfast\\.\\w+)(?!\\w|\\()`, "g")))
      if (table !== "holdfast.routine") needed.add(`${privilege} ${table}`);
  for (const [, name] of text.matchAll(/nextval\('(.*?)'\)/g)) needed.add(`USAGE ${name}`);
  expect([...needed].filter((each) => !granted.has(each))).toEqual([]);
});
