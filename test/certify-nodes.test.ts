/** `holdfast certify --node`: what is true of one node and not of two is found out, and nothing is broken or left behind by it. */
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import mysql, { type Connection, type RowDataPacket } from "mysql2/promise";
import { Client } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { probes } from "../packages/cli/src/certify/probes.ts";
import { type EmbeddedPostgres, startPostgres } from "../packages/cli/src/embedded.ts";
import { certified } from "./harness/certified.ts";
import { command } from "./harness/command.ts";
import { unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import { type Standby, primarySettings, startStandby } from "./harness/standby.ts";
import type { StartedServer } from "./harness/started-server.ts";
import { eventually } from "./harness/wait.ts";

const across = ["arrives", ...probes.filter((probe) => probe.across !== undefined).map(({ id }) => id)];

describe("PostgreSQL", () => {
  const reason = unavailable("postgres");
  let primary: EmbeddedPostgres;
  let standby: Standby;
  let folder: string;

  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-certify-"));
    if (reason !== undefined) return;
    primary = await startPostgres({ settings: primarySettings });
    standby = await startStandby(primary);
  });
  afterAll(async () => {
    await standby?.stop();
    await primary?.stop();
    await rm(folder, { recursive: true });
  });

  const left = async (url: string): Promise<unknown[]> => {
    const client = new Client({ connectionString: url });
    await client.connect();
    try {
      return (await client.query("SELECT relname FROM pg_class WHERE relname LIKE 'holdfast_certify%'")).rows;
    } finally {
      await client.end();
    }
  };

  test(
    "the same server by two addresses: all holds, and is told by node",
    { timeout: 120_000 },
    async ({ skip }) => {
      skip(reason !== undefined, reason);
      const page = join(folder, "certificate.html");
      const other = primary.url().replace("127.0.0.1", "localhost");
      const told = await certified([primary.url(), "--node", other, "--html", page]);
      expect(told.code, told.err).toBe(0);
      expect(told.of(2, "holds"), told.text).toEqual(across);
      expect(told.of(undefined, "holds")).toEqual(probes.map(({ id }) => id));
      expect(told.nodes).toMatchObject([{ node: 2, what: "it shares its locks with node 1" }]);
      expect(await readFile(page, "utf8")).toContain("<code>lock-excludes on node 2</code>");
      expect(await left(primary.url())).toEqual([]);
    },
  );

  test(
    "a standby: what it does not give is named, and is no failure",
    { timeout: 120_000 },
    async ({ skip }) => {
      skip(reason !== undefined, reason);
      const only = ["--only", "lock-excludes", "committed", "unique"];
      const told = await certified([primary.url(), "--node", standby.url(), ...only]);
      expect(told.code, told.err).toBe(0);
      expect(told.of(2, "absent"), told.text).toEqual(["committed", "lock-excludes"]);
      expect(told.of(2, "holds")).toEqual(["arrives"]);
      expect(told.nodes).toMatchObject([
        { node: 2, what: expect.stringMatching(/^a read-only replica: .* late$/) },
      ]);
      expect(told.err).toMatch(/^Waits for it to arrive on postgres:.*, 10 s at most\.$/m);
      await standby.caughtUp();
      expect(await left(standby.url())).toEqual([]);
      // Text is for people: the node's name is in each of its lines.
      const shown = await command(["certify", primary.url(), "--node", standby.url(), ...only]);
      expect(shown.out).toMatch(/^– lock-excludes on node 2: /m);
      expect(shown.out + shown.err).not.toContain(primary.password);
    },
  );

  test("one that replication does not reach is another database", { timeout: 120_000 }, async ({ skip }) => {
    skip(reason !== undefined, reason);
    const elsewhere = primary.url("template1");
    const told = await certified([primary.url(), "--node", elsewhere, "--only", "lock-excludes"]);
    expect(told.code).toBe(1);
    expect(told.of(2, "fails"), told.text).toEqual(["arrives"]);
    expect(told.text).toMatch(/arrives: this is another database/);
    expect(told.of(undefined, "holds")).toEqual(["lock-excludes"]);
  });

  test("what was typed wrong: one line, without a password", async ({ skip }) => {
    skip(reason !== undefined, reason);
    const kind = await command(["certify", primary.url(), "--node", "mysql://app:geheim@127.0.0.1:1/shop"]);
    expect(kind.code).toBe(2);
    expect(kind.err).toMatch(
      /^holdfast: mysql:\/\/app@127.0.0.1:1\/shop \(--node\) is MySQL; .* of one kind/,
    );
    const dead = await command([
      "certify",
      primary.url(),
      "--node",
      "postgres://app:geheim@127.0.0.1:1/shop",
    ]);
    expect(dead.code).toBe(2);
    expect(dead.err).toMatch(/^holdfast: Could not connect to postgres:\/\/app@127.0.0.1:1\/shop \(--node\)/);
    expect(kind.err + dead.err).not.toContain("geheim");
  });
});

describe("MariaDB", () => {
  const reason = unavailable("mariadb");
  const servers: StartedServer[] = [];
  const admins: Connection[] = [];

  /** Each replicates from the other one, and takes writes. */
  beforeAll(async () => {
    if (reason !== undefined) return;
    for (const id of [1, 2]) {
      const server = await startMariadb([`--server-id=${id}`, "--log-bin=log", "--binlog-format=ROW"]);
      servers.push(server);
      admins.push(await mysql.createConnection(server.url));
    }
    const ends = await Promise.all(admins.map((admin) => asked(admin, "SHOW MASTER STATUS")));
    for (const [i, admin] of admins.entries()) {
      const { port, password } = new URL(servers[1 - i]?.url ?? "");
      const { File: file, Position: position } = ends[1 - i] as Record<string, string>;
      await admin.query(
        `CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = ${port}, MASTER_USER = 'holdfast', MASTER_PASSWORD = '${password}', MASTER_LOG_FILE = '${file}', MASTER_LOG_POS = ${position}`,
      );
      await admin.query("START SLAVE");
    }
    await admins[0]?.query("CREATE DATABASE shop");
    await eventually(() => admins[1]?.query("USE shop").then(() => true));
  }, 120_000);
  afterAll(async () => {
    for (const admin of admins) admin.destroy();
    for (const server of servers) await server.stop();
  });

  const asked = async (admin: Connection | undefined, text: string): Promise<Partial<RowDataPacket>> =>
    (await admin?.query<RowDataPacket[]>(text))?.[0][0] ?? {};
  const urls = () => servers.map(({ url }) => Object.assign(new URL(url), { pathname: "/shop" }).href);

  test(
    "two that replicate from each other fail, and go on doing so",
    { timeout: 120_000 },
    async ({ skip }) => {
      skip(reason !== undefined, reason);
      const [one = "", other = ""] = urls();
      // Of the second one: without log_slave_updates, only what was written there.
      const before = await asked(admins[1], "SHOW MASTER STATUS");
      const told = await certified([one, "--node", other]);
      expect(told.code, told.err).toBe(1);
      expect(told.of(2, "fails"), told.text).toEqual(
        expect.arrayContaining(["lock-excludes", "session-lock", "row-lock", "skip-locked"]),
      );
      expect([...told.of(undefined, "fails"), ...told.of(undefined, "unknown")]).toEqual([]);
      // A read may be the newest by chance.
      const never = ["compare-and-set", "unique", "history-counter", "history-register"];
      expect(told.of(2, "unknown")).toEqual(expect.arrayContaining(never));
      expect(told.of(2, "holds")).toEqual(["arrives", "clock"]);
      expect(told.nodes).toMatchObject([
        { what: expect.stringMatching(/nothing keeps the two nodes apart/) },
      ]);
      expect(told.text).toMatch(/lock-excludes: A on node 1, B on node 2: A had the lock, and B got it too/);
      expect(await asked(admins[1], "SHOW MASTER STATUS")).toEqual(before);
      for (const admin of admins)
        expect(await asked(admin, "SHOW SLAVE STATUS")).toMatchObject({
          Slave_IO_Running: "Yes",
          Slave_SQL_Running: "Yes",
        });
      for (const admin of admins) expect(await asked(admin, "SHOW TABLES FROM shop")).toEqual({});
    },
  );

  test("what was committed and is not there yet fails", { timeout: 120_000 }, async ({ skip }) => {
    skip(reason !== undefined, reason);
    const [one = "", other = ""] = urls();
    // It arrives a second later.
    await admins[1]?.query("STOP SLAVE");
    await admins[1]?.query("CHANGE MASTER TO MASTER_DELAY = 1");
    await admins[1]?.query("START SLAVE");
    const told = await certified([one, "--node", other, "--only", "committed", "lock-then-read"]);
    expect(told.code, told.err).toBe(1);
    expect(told.of(2, "fails"), told.text).toEqual(["committed", "lock-then-read"]);
  });
});
