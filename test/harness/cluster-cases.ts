/**
 * What is true of every cluster whose nodes all take writes and compare them at COMMIT, asked from several nodes at once:
 * each thing is exact, or refused.
 */
import { type Holdfast, fenced, holdfast, key, versioned } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import mysql, { type Pool, type PoolConnection, type RowDataPacket } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { certified } from "./certified.ts";
import { command } from "./command.ts";
import type { StartedCluster } from "./started-server.ts";
import { eventually } from "./wait.ts";

export interface Node {
  /** Of the database `shop`. */
  readonly url: string;
  readonly pool: Pool;
  readonly hf: Holdfast<PoolConnection>;
}

export interface ClusterPlace {
  /** Why there is none in this run. */
  why: string | undefined;
  nodes: Node[];
}

export interface ClusterKind {
  readonly name: string;
  /** Why it is not to be started; to start it may fail as well. */
  readonly unavailable: string | undefined;
  start(): Promise<StartedCluster>;
  /** In what is refused. */
  readonly called: RegExp;
  /** Whether a transaction can have locks at all. */
  readonly locks: "at commit" | "refused";
}

/** As a node shows it. */
export async function number(node: Node, text: string): Promise<number> {
  const [rows] = await node.pool.query<RowDataPacket[]>(text);
  return Number(Object.values(rows[0] ?? {})[0]);
}

export const caught = (running: Promise<unknown>): Promise<unknown> =>
  running.then(
    (value) => ({ returned: value }),
    (error: unknown) => error,
  );

/** What was committed on one node, all others show. */
export async function everywhere(nodes: readonly Node[], text: string, wanted: number): Promise<void> {
  for (const node of nodes)
    await eventually(async () => expect(await number(node, text)).toBe(wanted), { timeout: 60_000 });
}

export function clusterCases(
  { name, unavailable, start, called, locks }: ClusterKind,
  more: (place: ClusterPlace, nodes: { first(): Node; second(): Node }) => void,
): void {
  // oxlint-disable-next-line vitest/valid-title -- it is one.
  describe(name, () => {
    let cluster: StartedCluster | undefined;
    const place: ClusterPlace = { why: unavailable, nodes: [] };
    const first = () => place.nodes[0] as Node;
    const second = () => place.nodes[1] as Node;

    beforeAll(async () => {
      try {
        if (place.why === undefined) cluster = await start();
      } catch (error) {
        place.why = `${name} could not be started: ${String(error)}`;
      }
      if (!cluster) {
        console.log(place.why);
        if (process.env["CI"]) throw new Error(place.why);
        return;
      }
      const [url = ""] = cluster.urls;
      const setup = await mysql.createConnection(url);
      await setup.query("CREATE DATABASE shop");
      await setup.query(
        "CREATE TABLE shop.counter (id int PRIMARY KEY, n int NOT NULL, version int NOT NULL)",
      );
      await setup.query(
        "CREATE TABLE shop.upload (id int AUTO_INCREMENT PRIMARY KEY, who varchar(99) NOT NULL)",
      );
      await setup.query(
        "CREATE TABLE shop.backlog (id int AUTO_INCREMENT PRIMARY KEY, filler char(200) NOT NULL)",
      );
      // Somebody who may see nothing but this database.
      await setup.query("CREATE USER 'app'@'%' IDENTIFIED BY 'app'");
      await setup.query("GRANT ALL PRIVILEGES ON shop.* TO 'app'@'%'");
      await setup.end();
      for (const each of cluster.urls) {
        const own = Object.assign(new URL(each), {
          pathname: "/shop",
          username: "app",
          password: "app",
        }).href;
        const pool = mysql.createPool({ uri: own, connectionLimit: 8 });
        place.nodes.push({ url: own, pool, hf: holdfast(fromMysql2(pool), { hazards: "count" }) });
      }
      for (const node of place.nodes)
        await eventually(() => node.pool.query("SELECT 1 FROM backlog").then(() => true));
      await first().hf.migrate();
      for (const node of place.nodes)
        await eventually(async () =>
          expect((await node.hf.migrations()).map(({ state }) => state)).not.toContain("missing"),
        );
    }, 300_000);

    beforeEach(async ({ skip }) => {
      skip(place.why !== undefined, place.why);
      await first().pool.query("DELETE FROM upload");
      await first().pool.query("DELETE FROM backlog");
      await first().pool.query("REPLACE INTO counter VALUES (1, 0, 0), (2, 0, 0)");
      await everywhere(place.nodes, "SELECT count(*) FROM upload", 0);
      await everywhere(place.nodes, "SELECT count(*) FROM backlog", 0);
      await everywhere(place.nodes, "SELECT count(*) FROM counter WHERE n = 0 AND version = 0", 2);
    });

    afterAll(async () => {
      for (const { hf, pool } of place.nodes) {
        await hf.close();
        await pool.end();
      }
      await cluster?.stop();
    });

    test("is known by everybody, and says what it can", async () => {
      for (const { hf } of place.nodes) {
        const found = await hf.capabilities();
        expect(found).toMatchObject({ exclusion: "at commit", versions: true });
        expect(found.isolation).toEqual(["read committed", "repeatable read"]);
        const { transactionLocks, joinedLocks, once, sessionLocks, rowLocks, leases } = found;
        for (const support of [transactionLocks, joinedLocks, once])
          expect(typeof support !== "object").toBe(locks === "at commit");
        for (const gap of [sessionLocks, rowLocks, leases])
          expect(gap).toMatchObject({ supported: false, why: expect.stringMatching(called) as string });
      }
    });

    test("what needs locks that are held is refused, and nothing runs", async () => {
      const refused: unknown[] = [];
      let ran = 0;
      const body = async () => void ran++;
      await Promise.all(
        place.nodes.slice(0, 2).map(async ({ hf }) => {
          const lock = key("job");
          refused.push(
            await caught(hf.tryLock(lock, body)),
            await caught(hf.transaction((tx) => tx.tryLock(lock).then((taken) => taken && body()))),
            await caught(
              hf.transaction((tx) => tx.lock(lock, { wait: "skip" }).then((taken) => taken && body())),
            ),
            await caught(hf.hold(lock).then(body)),
            await caught(hf.lease(lock).then(body)),
            await caught(
              hf
                .lease(lock, { wait: "skip" })
                .then((lease) => hf.transaction((tx) => fenced(tx, lease as never)).then(body)),
            ),
            await caught(hf.semaphore(key("permits"), { permits: 1 }).acquire().then(body)),
            await caught(hf.transaction((tx) => tx.rows("counter", [1]).then(body))),
            await caught(hf.transaction({ lock, isolation: "serializable" }, body)),
          );
        }),
      );
      expect(ran).toBe(0);
      expect(refused).toHaveLength(18);
      for (const error of refused)
        expect(error).toMatchObject({ code: expect.stringMatching(/^HF_(?:UNSUPPORTED|USAGE)$/) as string });
    });

    test("versions count up by one with every update", async () => {
      const each = 8;
      await Promise.all(
        place.nodes.map(async ({ hf }) => {
          const rows = versioned<{ id: number; n: number; version: number }>(hf, "counter", {
            attempts: 100,
          });
          for (let i = 0; i < each; i++) await rows.update(2, ({ n }) => ({ n: n + 1 }));
        }),
      );
      await everywhere(
        place.nodes,
        "SELECT n FROM counter WHERE id = 2 AND n = version",
        place.nodes.length * each,
      );
    });

    test("what is decided by two rows counts for both", async () => {
      const { pool } = first();
      for (let round = 0; round < 5; round++) {
        // A node that is late with another one's COMMIT of the round before refuses this.
        await eventually(() => pool.query("UPDATE counter SET n = 1"), { timeout: 60_000 });
        await everywhere(place.nodes, "SELECT sum(n) FROM counter", 2);
        // One of them may leave, if the other one stays. Both have read that it does before either writes.
        const read = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
        const leave = (node: Node, i: number) =>
          versioned<{ id: number; n: number }>(node.hf, "counter", { attempts: 100 }).updateAll(
            [1, 2],
            async (rows) => {
              read[i]?.resolve();
              await Promise.all(read.map(({ promise }) => promise));
              const both = rows.every(({ n }) => n === 1);
              return rows.map((_, at) => (both && at === i ? { n: 0 } : undefined));
            },
          );
        await Promise.all([first(), second()].map(leave));
        await everywhere(place.nodes, "SELECT sum(n) FROM counter", 1);
      }
    });

    test("certify tells what holds between nodes, and on one of them that it cannot", async () => {
      const exact = ["arrives", "compare-and-set", "unique", "history-counter", "history-register"];
      const known = ["committed", "lock-excludes", "row-lock"];
      const only = ["--only", ...exact.slice(1), ...known];
      const told = await certified([first().url, "--node", second().url, ...only]);
      expect(told.code, told.err).toBe(0);
      expect(told.of(2, "holds"), told.text).toEqual(expect.arrayContaining(exact));
      expect(told.of(2, "absent"), told.text).toEqual(expect.arrayContaining(known));
      expect(told.text).toMatch(
        /absent lock-excludes: A on node 1, B on node 2: A had the lock, and B got it too/,
      );
      expect(told.nodes).toMatchObject([{ what: expect.stringMatching(/^a node of the same cluster/) }]);
      for (const { pool } of place.nodes)
        expect((await pool.query("SHOW TABLES LIKE 'holdfast_certify%'"))[0]).toEqual([]);
      const alone = await command(["certify", first().url, "--only", "lock-excludes"]);
      expect([alone.code, alone.out]).toEqual([
        0,
        expect.stringMatching(/one node of a cluster \((?:Galera|Group Replication)\)[^]*--node URL/),
      ]);
    }, 120_000);

    more(place, { first, second });
  });
}
