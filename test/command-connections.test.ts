/** `holdfast locks` and `doctor` on servers that have one connection left, or none: when they are needed most. */
import { randomBytes } from "node:crypto";
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import mysql, { type Connection } from "mysql2/promise";
import { Client } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Outcome, command, start } from "./harness/command.ts";
import { serverUrl, unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import { startPgbouncer } from "./harness/pgbouncer.ts";
import { eventually } from "./harness/wait.ts";

/** Who waits for whom, and further findings. */
function expectTold(locks: Outcome, doctor: Outcome): void {
  expect([locks.code, locks.err]).toEqual([0, ""]);
  expect(locks.out).toMatch(/1 waits? behind 1 in /);
  expect([doctor.code, doctor.err]).toEqual([1, ""]);
  expect(doctor.out).toMatch(/\n✗ waits\n {2}session \d+ /);
  expect(doctor.out).toContain("\n! lock-timeout\n");
}

const look = async (url: string, verb: string, ...args: string[]): Promise<Outcome> =>
  command([verb, "--url", url, ...args]);

describe("PostgreSQL", () => {
  const reason = unavailable("pgbouncer");
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  let server: EmbeddedPostgres;
  let app: string;
  let admin: Client;
  const stops: (() => Promise<unknown>)[] = [];
  const open = async (url: string): Promise<Client> => {
    const client = new Client({ connectionString: url });
    client.on("error", () => {});
    await client.connect();
    stops.push(() => client.end());
    return client;
  };
  /** The superuser's not counted. */
  const inUse = async (): Promise<number> =>
    Number(
      (await admin.query("SELECT count(*) AS n FROM pg_stat_activity WHERE usename IN ('app', 'vip')"))
        .rows[0].n,
    );

  beforeAll(async () => {
    if (reason !== undefined) return;
    server = await startPostgres({
      settings: {
        fsync: "off",
        max_connections: "9",
        superuser_reserved_connections: "2",
        reserved_connections: "1",
        max_wal_senders: "0",
      },
    });
    stops.push(server.stop);
    admin = await open(server.url());
    await admin.query(`CREATE ROLE app LOGIN PASSWORD 'app'; GRANT pg_monitor TO app;
      CREATE ROLE vip LOGIN PASSWORD 'vip'; GRANT pg_monitor, pg_use_reserved_connections TO vip;
      CREATE TABLE seat (id int PRIMARY KEY, n int); INSERT INTO seat VALUES (1, 0); GRANT ALL ON seat TO app`);
    app = server.url("postgres", { user: "app", password: "app" });
    const [holder, waiter] = [await open(app), await open(app)];
    await holder.query("BEGIN; UPDATE seat SET n = 1");
    waiter.query("UPDATE seat SET n = 2").catch(() => {});
    await eventually(
      async () =>
        (
          await admin.query(
            "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND state_change < clock_timestamp() - interval '1.5 s'",
          )
        ).rows.length === 1,
    );
  });
  afterAll(async () => {
    for (const stop of stops.toReversed()) await stop();
  });

  test("one connection is enough; without any, which are kept for whom", async () => {
    const others: Client[] = [];
    await expect(
      (async () => {
        for (let i = 0; i < 20; i++) others.push(await open(app));
      })(),
    ).rejects.toMatchObject({ code: "53300" });
    const full = await inUse();
    for (const verb of ["locks", "doctor"]) {
      const { code, out, err } = await look(app, verb);
      expect([code, out]).toEqual([2, ""]);
      expect(err).toMatch(/reserved_connections.*superuser_reserved_connections.*max_connections/);
      expect(err).not.toContain("CONNECTION LIMIT");
    }
    const vip = server.url("postgres", { user: "vip", password: "vip" });
    expectTold(await look(vip, "locks"), await look(vip, "doctor"));
    for (let left = 1; left <= 3; left++) {
      await others.pop()?.end();
      await eventually(async () => (await inUse()) === full - left);
      const locks = await look(app, "locks");
      await eventually(async () => (await inUse()) === full - left);
      const doctor = await look(app, "doctor");
      expectTold(locks, doctor);
      if (left < 3) expect(doctor.out).toMatch(/\? .*advisory-locks.*\n {2}it takes another connection/);
      await eventually(async () => (await inUse()) === full - left);
    }
    for (const other of others) await other.end();
  });

  test("the limit of a role, and one of a database", async () => {
    await admin.query("CREATE ROLE few LOGIN PASSWORD 'few' CONNECTION LIMIT 0");
    await admin.query("CREATE DATABASE narrow CONNECTION LIMIT 0");
    const few = await look(server.url("postgres", { user: "few", password: "few" }), "locks");
    expect([few.code, few.err]).toEqual([2, expect.stringContaining("ALTER ROLE … CONNECTION LIMIT")]);
    const narrow = await look(server.url("narrow", { user: "app", password: "app" }), "locks");
    expect([narrow.code, narrow.err]).toEqual([
      2,
      expect.stringContaining("ALTER DATABASE … CONNECTION LIMIT"),
    ]);
  });

  test("a pooler that has no server connection left, or one", async () => {
    const pooler = await startPgbouncer(server, "transaction", ["default_pool_size = 2"]);
    stops.push(pooler.stop);
    const [first, second] = [await open(pooler.url), await open(pooler.url)];
    await first.query("BEGIN");
    await second.query("BEGIN");
    const verbs = ["locks", "doctor", "queue"];
    for (const { code, out, err } of await Promise.all(verbs.map((verb) => look(pooler.url, verb)))) {
      expect([code, out]).toEqual([2, ""]);
      expect(err).toMatch(/no answer within \d+ s\..*Connect past the pooler.*default_pool_size/);
    }
    await second.query("ROLLBACK");
    const locks = await look(pooler.url, "locks");
    const { code, out, err } = await look(pooler.url, "doctor");
    expect([code, err]).toEqual([1, ""]);
    expectTold(locks, { code, out, err, signal: null });
    expect(out).toMatch(/\? .*advisory-locks.*\n {2}no answer within/);
    expect(out).toMatch(/\n\d+ checks: /);
    // What was found is printed before the check that waits for a second server connection.
    const stopped = start(["doctor", "--url", pooler.url]);
    await eventually(() => {
      expect(stopped.out()).toContain("✗ waits");
    });
    stopped.child.kill("SIGINT");
    const told = await stopped.done;
    expect(told.code).toBe(130);
    expect(told.out).toMatch(/\n\d+ of \d+ checks, the others were not run: \d+ errors?/);
    await first.query("ROLLBACK");
  }, 240_000);
});

describe.each(["mariadb", "mysql"] as const)("%s", (kind) => {
  const reason = unavailable(kind);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  const database = `short_${randomBytes(6).toString("hex")}`;
  const stops: (() => Promise<unknown>)[] = [];
  afterAll(async () => {
    for (const stop of stops.toReversed()) await stop();
  });

  const open = async (url: string): Promise<Connection> => {
    const connection = await mysql.createConnection(url);
    connection.on("error", () => {});
    stops.push(async () => connection.destroy());
    return connection;
  };

  test("one connection is enough; without any, which limit it is", async () => {
    // A server that is full; and, of one that others use, a user who has all that it may have.
    const isOwn = kind === "mariadb";
    const own = isOwn ? await startMariadb(["--max-connections=6"]) : undefined;
    if (own) stops.push(own.stop);
    const address = new URL(own?.url ?? serverUrl(kind));
    const admin = await open(address.href);
    stops.push(() => admin.query(`DROP DATABASE ${database}`));
    await admin.query(`CREATE DATABASE ${database}`);
    await admin.query(
      `CREATE USER ${database}@'%' IDENTIFIED BY 'app'${isOwn ? "" : " WITH MAX_USER_CONNECTIONS 4"}`,
    );
    stops.push(() => admin.query(`DROP USER ${database}@'%'`));
    await admin.query(`GRANT ALL ON ${database}.* TO ${database}@'%'`);
    await admin.query(`GRANT PROCESS ON *.* TO ${database}@'%'`);
    if (!isOwn) await admin.query(`GRANT SELECT ON performance_schema.* TO ${database}@'%'`);
    const app = `mysql://${database}:app@${address.host}/${database}`;
    const [holder, waiter] = [await open(app), await open(app)];
    await holder.query("CREATE TABLE seat (id int PRIMARY KEY, n int)");
    await holder.query("INSERT INTO seat VALUES (1, 0)");
    await holder.query("BEGIN");
    await holder.query("UPDATE seat SET n = 1");
    await waiter.query("SET innodb_lock_wait_timeout = 600");
    waiter.query("UPDATE seat SET n = 2").catch(() => {});
    const inUse = async (): Promise<number> => {
      const [rows] = await admin.query("SELECT id, time FROM information_schema.processlist WHERE user = ?", [
        database,
      ]);
      return (rows as unknown[]).length;
    };
    const others: Connection[] = [];
    await expect(
      (async () => {
        for (let i = 0; i < 20; i++) others.push(await open(app));
      })(),
    ).rejects.toMatchObject({ errno: isOwn ? 1040 : 1226 });
    // The holder, the waiter and these. The server lists the connection that it refused for a moment, too.
    const full = others.length + 2;
    await eventually(async () => (await inUse()) === full);
    for (const verb of ["locks", "doctor"]) {
      const { code, out, err } = await look(app, verb);
      expect([code, out]).toEqual([2, ""]);
      expect(err).toMatch(isOwn ? /CONNECTION_ADMIN.*max_connections/ : /MAX_USER_CONNECTIONS/);
    }
    await others.pop()?.end();
    await eventually(async () => (await inUse()) === full - 1);
    await eventually(async () => {
      const [rows] = await admin.query(
        "SELECT id FROM information_schema.processlist WHERE user = ? AND info LIKE 'UPDATE%' AND time > 1",
        [database],
      );
      return (rows as unknown[]).length === 1;
    });
    const locks = await look(app, "locks");
    await eventually(async () => (await inUse()) === full - 1);
    const doctor = await look(app, "doctor");
    expectTold(locks, doctor);
    expect(doctor.out).toMatch(/\? advisory-locks, pooler\n {2}it takes another connection/);
  });
});
