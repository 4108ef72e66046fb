/** Servers that take writes although another one feeds them: locks and patterns are refused, unless that is meant. */
import { startPostgres } from "@holdfast/cli";
import { type Holdfast, type HoldfastOptions, holdfast, key, once } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import mysql from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterEach, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import { startMysql } from "./harness/mysql.ts";
import type { RestartableServer } from "./harness/started-server.ts";
import { eventually } from "./harness/wait.ts";

const ends: (() => unknown)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).toReversed()) await end();
});

const calls: Record<string, (hf: Holdfast<any>) => Promise<unknown>> = {
  transaction: (hf) => hf.transaction({ lock: key("k") }, async () => {}),
  lock: (hf) => hf.lock(key("k"), async () => {}),
  hold: async (hf) => (await hf.hold(key("k"))).release(),
  lease: async (hf) => (await hf.lease(key("lease"), { ttl: 60_000 })).release(),
  once: (hf) => once(hf, ["order", 1], async () => 1),
  quota: (hf) => quota(hf, { name: "q", limit: 5 }).consume("ada"),
  stock: (hf) => stock(hf).increase("sku", 1),
  queue: (hf) => queue(hf, "mails").enqueue("x"),
};

const codeOf = async (work: Promise<unknown>): Promise<unknown> =>
  work.then(
    () => "done",
    (error: { code?: unknown }) => error.code ?? error,
  );

/** `but`: without this one. */
async function everyCall(hf: Holdfast<any>, but?: string): Promise<Record<string, unknown>> {
  const told: Record<string, unknown> = {};
  for (const [name, call] of Object.entries(calls)) if (name !== but) told[name] = await codeOf(call(hf));
  return told;
}

const all = (code: string, but?: string) =>
  Object.fromEntries(Object.keys(calls).flatMap((name) => (name === but ? [] : [[name, code]])));

/** Numbers that both servers give do not go together: that is why it is refused. */
const numbered = "queue";

/** Fails if the replica is called a primary, or the primary a replica. */
async function examine(
  open: (url: string, options?: HoldfastOptions) => Holdfast<any>,
  primary: string,
  replica: string,
  source: RegExp,
) {
  expect(await everyCall(open(primary))).toEqual(all("done"));
  const here = open(replica);
  expect(await everyCall(here)).toEqual(all("HF_REPLICA"));
  await expect(calls["quota"]?.(here)).rejects.toThrow(source);
  await expect(calls["quota"]?.(here)).rejects.toThrow("acceptReplica: true");
  const { primary: found } = await here.capabilities();
  expect(found).toMatchObject({ why: expect.stringMatching(source) });
  await here.inspect();
  expect(await everyCall(open(replica, { acceptReplica: true }), numbered)).toEqual(all("done", numbered));
  const doctor = await command(["doctor", "--json", "--only", "replica", "--url", replica]);
  expect((JSON.parse(doctor.out) as { findings: unknown[] }).findings).toMatchObject([
    { severity: "error", what: expect.stringMatching(source) },
  ]);
  const certify = await command(["certify", "--json", "--only", "committed", "--url", replica]);
  expect(certify.code).toBe(1);
  expect(JSON.parse(certify.out)).toMatchObject({ refused: expect.stringMatching(source) });
  return here;
}

const openMysql = (url: string, options?: HoldfastOptions): Holdfast<any> => {
  const pool = mysql.createPool({ uri: url, connectionLimit: 5 });
  const hf = holdfast(fromMysql2(pool), options);
  ends.push(async () => {
    await hf.close();
    await pool.end();
  });
  return hf;
};

interface Pair {
  readonly primary: string;
  readonly replica: string;
  /** On the replica. */
  readonly admin: mysql.Connection;
  readonly start: string;
  readonly stop: string;
  /** Makes it replicate a database that is not ours, and nothing else. */
  readonly filter: string;
}

async function connect(url: string): Promise<mysql.Connection> {
  const connection = await mysql.createConnection(url);
  ends.push(() => connection.end());
  return connection;
}

const shopAt = (url: string) => url.replace(/\/mysql$/, "/shop");

async function mariadbPair(): Promise<Pair> {
  const [primary, replica] = (await Promise.all(
    [1, 2].map((id) => startMariadb(["--log-bin=changes", `--server-id=${id}`])),
  )) as [RestartableServer, RestartableServer];
  ends.push(primary.stop, replica.stop);
  const { hostname, port, username, password } = new URL(primary.url);
  const admin = await connect(replica.url);
  // Not from the start, where each server makes its own user.
  const [[status]] = await (await connect(primary.url)).query<mysql.RowDataPacket[]>("SHOW MASTER STATUS");
  await admin.query(
    `CHANGE MASTER TO MASTER_HOST = '${hostname}', MASTER_PORT = ${port}, MASTER_USER = '${username}', MASTER_PASSWORD = '${password}', MASTER_LOG_FILE = '${status?.["File"]}', MASTER_LOG_POS = ${status?.["Position"]}`,
  );
  await admin.query("START SLAVE");
  await (await connect(primary.url)).query("CREATE DATABASE shop");
  await openMysql(shopAt(primary.url)).migrate();
  await (await connect(shopAt(primary.url))).query("CREATE TABLE last (n int)");
  await eventually(async () => {
    const [rows] = await admin.query<mysql.RowDataPacket[]>("SHOW TABLES FROM shop LIKE 'last'");
    return rows.length > 0;
  });
  return {
    primary: shopAt(primary.url),
    replica: shopAt(replica.url),
    admin,
    start: "START SLAVE",
    stop: "STOP SLAVE",
    filter: "SET GLOBAL replicate_do_db = 'elsewhere'",
  };
}

/** It tries to connect to its source, again and again: that is what counts as well. */
async function mysqlPair(): Promise<Pair> {
  const [primary, replica] = await Promise.all([createDatabase("mysql"), startMysql(["--server-id=2"])]);
  ends.push(primary.drop, replica.stop);
  const admin = await connect(replica.url);
  await admin.query("CREATE DATABASE shop");
  for (const url of [primary.url, shopAt(replica.url)]) await openMysql(url).migrate();
  const { hostname, port } = new URL(primary.url);
  await admin.query(
    `CHANGE REPLICATION SOURCE TO SOURCE_HOST = '${hostname}', SOURCE_PORT = ${port}, SOURCE_USER = 'nobody'`,
  );
  await admin.query("START REPLICA");
  return {
    primary: primary.url,
    replica: shopAt(replica.url),
    admin,
    start: "START REPLICA",
    stop: "STOP REPLICA",
    filter: "CHANGE REPLICATION FILTER REPLICATE_DO_DB = (elsewhere)",
  };
}

test.for(["mariadb", "mysql"] as const)("%s: a replica without read_only", async (server, { skip }) => {
  skip(unavailable(server) !== undefined, unavailable(server));
  const { primary, replica, admin, start, stop, filter } = await (server === "mariadb"
    ? mariadbPair()
    : mysqlPair());
  const here = await examine(openMysql, primary, replica, /replicates from 127\.0\.0\.1/);

  await admin.query("CREATE USER 'plain'@'%' IDENTIFIED BY 'pw'");
  await admin.query("GRANT ALL ON shop.* TO 'plain'@'%'");
  const login = new URL(replica);
  [login.username, login.password] = ["plain", "pw"];
  // MySQL tells only users with a right to see it, as docs/engines/mysql.md says.
  const expected = server === "mysql" ? "done" : "HF_REPLICA";
  expect(await everyCall(openMysql(login.href))).toEqual(all(expected));

  await admin.query(stop);
  await admin.query(filter);
  await admin.query(start);
  expect(await everyCall(openMysql(replica))).toEqual(all("done"));

  await admin.query(stop);
  // The instance that was refused looks again.
  expect(await everyCall(here)).toEqual(all("done"));
});

test("PostgreSQL: a database that subscribes to our tables", async ({ skip }) => {
  skip(unavailable("postgres") !== undefined, unavailable("postgres"));
  const server = await startPostgres({ settings: { fsync: "off", wal_level: "logical" } });
  ends.push(server.stop);
  const open = (url: string, options?: HoldfastOptions): Holdfast<any> => {
    const pool = new Pool({ connectionString: url, max: 5 }).on("error", () => {});
    // pool.end() does not wait until its sessions have ended: the server may be stopped before.
    pool.on("connect", (client) => client.on("error", () => {}));
    const hf = holdfast(fromPg(pool), options);
    ends.push(async () => {
      await hf.close();
      await pool.end();
    });
    return hf;
  };
  const admin = new Client({ connectionString: server.url() });
  await admin.connect();
  await admin.query("CREATE DATABASE here");
  await admin.query("CREATE DATABASE there");
  await admin.end();
  const [here, there] = ["here", "there"].map((name) => server.url(name)) as [string, string];
  for (const url of [here, there]) await open(url).migrate();
  const [publisher, subscriber] = [here, there].map((url) => new Client({ connectionString: url })) as [
    Client,
    Client,
  ];
  for (const client of [publisher, subscriber]) {
    await client.connect();
    ends.push(() => client.end());
  }
  // On one server a subscription cannot make its slot: it would wait for itself.
  await publisher.query("SELECT pg_create_logical_replication_slot('ours', 'pgoutput')");
  await publisher.query("CREATE PUBLICATION ours FOR TABLES IN SCHEMA holdfast");
  await subscriber.query("CREATE TABLE app (id int)");
  await subscriber.query(
    `CREATE SUBSCRIPTION ours CONNECTION '${here.replaceAll("'", "''")}' PUBLICATION ours WITH (create_slot = false, slot_name = 'ours', copy_data = false)`,
  );
  ends.push(async () => {
    await subscriber.query("ALTER SUBSCRIPTION ours DISABLE");
    await subscriber.query("ALTER SUBSCRIPTION ours SET (slot_name = NONE)");
    await subscriber.query("DROP SUBSCRIPTION ours");
  });
  const replica = await examine(open, here, there, /subscription "ours"/);
  await subscriber.query("ALTER SUBSCRIPTION ours DISABLE");
  expect(await everyCall(replica, numbered)).toEqual(all("done", numbered));
});
