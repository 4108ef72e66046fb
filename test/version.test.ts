/**
 * Servers that are not here: too old, or only looking like the one they answer as. The real server's answer is
 * changed on its way, so everything but the version is as it would be.
 */
import { type Holdfast, ServerTooOldError, UnsupportedError, holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { createConnection, createPool } from "mysql2/promise";
import { Client, Pool } from "pg";
import { beforeEach, describe, expect, onTestFinished, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";

/** A new database behind a proxy that replaces one text by another in everything that the server says. */
async function behindProxy(
  server: "postgres" | "mariadb",
): Promise<{ url: string; direct: string; replace(what: string, by: string): void }> {
  const database = await createDatabase(server);
  onTestFinished(() => database.drop());
  const proxy: Proxy = await startProxy({ port: Number(new URL(database.url).port) });
  onTestFinished(() => proxy.close());
  return {
    url: proxy.url(database.url),
    direct: database.url,
    replace(what, by) {
      if (what.length !== by.length) throw new Error(`${by} is not as long as ${what}`);
      proxy.rewrite((direction, chunk) =>
        direction === "to-client"
          ? // Byte for byte: what is not text stays as it is.
            Buffer.from(chunk.toString("latin1").replaceAll(what, by), "latin1")
          : chunk,
      );
    },
  };
}

/** Every way in: nothing may be begun or locked on such a server. */
async function refusals(hf: Holdfast<unknown>): Promise<unknown[]> {
  const body = async () => expect.unreachable("the body ran");
  const ways = [
    () => hf.transaction(body),
    () => hf.lock(key("version"), body),
    () => hf.tryLock(key("version"), body),
    () => hf.hold(key("version")),
    () => hf.capabilities(),
  ];
  const errors: unknown[] = [];
  for (const way of ways)
    errors.push(
      await way().then(
        () => "it was not refused",
        (error: unknown) => error,
      ),
    );
  return errors;
}

describe("PostgreSQL", () => {
  const why = unavailable("postgres");
  beforeEach(({ skip }) => skip(why !== undefined, why));

  async function open(changed: (version: { number: string; full: string }) => [string, string] | undefined) {
    const { url, direct, replace } = await behindProxy("postgres");
    const client = new Client(direct);
    await client.connect();
    const { rows } = await client.query<{ number: string; full: string }>(
      "SELECT current_setting('server_version_num') AS number, version() AS full",
    );
    await client.end();
    const change = changed(rows[0] as { number: string; full: string });
    if (change) replace(...change);
    const pool = new Pool({ connectionString: url, max: 2 });
    onTestFinished(() => pool.end());
    const hf = holdfast(fromPg(pool));
    onTestFinished(() => hf.close());
    return { hf, pool };
  }

  test("of the version it says is taken through the proxy", async () => {
    const { hf } = await open(() => undefined);
    expect(await hf.lock(key("version"), async () => 1)).toBe(1);
  });

  test("of the oldest version that will do is taken", async () => {
    const { hf } = await open(({ number }) => [number, "140000"]);
    expect(await hf.lock(key("version"), async () => 1)).toBe(1);
  });

  test.each(["139999", "130021", "090624"])("%s is too old", async (old) => {
    const { hf, pool } = await open(({ number }) => [number, old]);
    for (const error of await refusals(hf)) {
      expect(error).toBeInstanceOf(ServerTooOldError);
      expect(error).toMatchObject({ code: "HF_SERVER_TOO_OLD", retryable: false });
      expect((error as Error).message).toContain(`PostgreSQL ${Math.floor(Number(old) / 10_000)};`);
      expect((error as Error).message).toContain("PostgreSQL 14 or newer");
    }
    expect(pool.idleCount).toBe(pool.totalCount);
  });

  test("is asked again after a refusal: servers are upgraded", async () => {
    const { url, replace } = await behindProxy("postgres");
    const pool = new Pool({ connectionString: url, max: 2 });
    onTestFinished(() => pool.end());
    const hf = holdfast(fromPg(pool));
    const { rows } = await pool.query("SELECT current_setting('server_version_num') AS number");
    const number = (rows as [{ number: string }])[0].number;
    replace(number, "130021");
    await expect(hf.lock(key("version"), async () => 1)).rejects.toBeInstanceOf(ServerTooOldError);
    replace(number, number);
    expect(await hf.lock(key("version"), async () => 1)).toBe(1);
  });

  /** Names that stand where "PostgreSQL 18.4 on …" would. */
  test.each(["CockroachDB CCL v25", "Aurora DSQL 16", "Materialize v0.9", "PostgreSQL 8.0.2 Redshift"])(
    "%s is none",
    async (name) => {
      const { hf } = await open(({ full }) => [full, name.padEnd(full.length)]);
      for (const error of await refusals(hf)) {
        expect(error).toBeInstanceOf(UnsupportedError);
        expect(error).toMatchObject({ code: "HF_UNSUPPORTED", retryable: false });
        expect((error as Error).message).toMatch(
          /^(CockroachDB|Aurora DSQL|Materialize|Redshift) answers like/,
        );
      }
    },
  );
});

describe("MariaDB and MySQL", () => {
  const why = unavailable("mariadb");
  beforeEach(({ skip }) => skip(why !== undefined, why));

  async function open(version: (real: string) => string) {
    const { url, direct, replace } = await behindProxy("mariadb");
    const connection = await createConnection(direct);
    const [rows] = await connection.query("SELECT VERSION() AS version");
    await connection.end();
    const real = (rows as [{ version: string }])[0].version;
    replace(real, version(real));
    const pool = createPool({ uri: url, connectionLimit: 2 });
    onTestFinished(() => pool.end());
    const hf = holdfast(fromMysql2(pool));
    onTestFinished(() => hf.close());
    return hf;
  }

  test.each(["10.5.29-MariaDB", "10.2.44-MariaDB", "5.5.68-MariaDB"])("%s is too old", async (old) => {
    const hf = await open((real) => old.padEnd(real.length, "+"));
    for (const error of await refusals(hf)) {
      expect(error).toBeInstanceOf(ServerTooOldError);
      expect(error).toMatchObject({ code: "HF_SERVER_TOO_OLD", retryable: false });
      expect((error as Error).message).toContain(`MariaDB ${old}`);
      expect((error as Error).message).toContain("MariaDB 10.6 or newer");
    }
  });

  test.each(["8.0.35", "5.7.44"])("MySQL %s is too old", async (old) => {
    const hf = await open((real) => `${old}-`.padEnd(real.length, "x"));
    for (const error of await refusals(hf)) {
      expect(error).toBeInstanceOf(ServerTooOldError);
      expect((error as Error).message).toContain(`MySQL ${old}`);
      expect((error as Error).message).toContain("MySQL 8.0.36 or newer");
    }
  });

  test("of the oldest version that will do is taken", async () => {
    const hf = await open((real) => "10.6.0-MariaDB".padEnd(real.length, "+"));
    await hf.migrate();
    expect(await hf.lock(key("version"), async () => 1)).toBe(1);
  });
});
