import {
  ReplicaError,
  SerializationError,
  type Transaction,
  UnsupportedError,
  holdfast,
  key,
  once,
} from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import mysql, { type Pool, type PoolConnection } from "mysql2/promise";
import { describe, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { type Node, caught, clusterCases, everywhere, number } from "./harness/cluster-cases.ts";
import { unavailable } from "./harness/databases.ts";
import { startGroup } from "./harness/group-replication.ts";
import type { StartedCluster } from "./harness/started-server.ts";
import { eventually } from "./harness/wait.ts";

let group: StartedCluster;

clusterCases(
  {
    name: "Group Replication with several primaries",
    unavailable: unavailable("mysql"),
    start: async () => (group = await startGroup()),
    locks: "refused",
    called: /this is a group with several primaries \(Group Replication\)/,
  },
  ({ nodes }, { first, second }) => {
    test("locks, and what rests on them, are refused, and nothing is written", async () => {
      for (const { hf, pool } of nodes) {
        const body = (tx: { client: PoolConnection }) =>
          tx.client.query("INSERT INTO upload (who) VALUES ('nobody')").then(() => {});
        const lock = key("counter", 1);
        const late = async (tx: Transaction<PoolConnection>) => {
          await tx.lock(lock);
          await body(tx);
        };
        for (const call of [
          () => hf.transaction({ lock }, body),
          () => hf.lock(lock, body),
          () => hf.transaction(late),
          () => once(hf, "event", body),
        ])
          await expect(call()).rejects.toThrow(UnsupportedError);
        const connection = await pool.getConnection();
        await connection.beginTransaction();
        await expect(hf.join(connection).lock(lock)).rejects.toThrow(/one primary/);
        await connection.rollback();
        connection.release();
      }
      await everywhere(nodes, "SELECT count(*) FROM upload", 0);
    });

    test("the doctor names it", async () => {
      const { out } = await command(["doctor", "--only", "group-replication", "--url", first().url]);
      expect(out).toMatch(/group_replication_single_primary_mode is OFF[^]*versions\s+are exact/);
    });

    // If this fails, the server has been mended, and locks could be given.
    test("that is since the server commits what it has undone, from the next SAVEPOINT on", async () => {
      const connection = await second().pool.getConnection();
      await connection.beginTransaction();
      await connection.query("UPDATE counter SET n = 7 WHERE id = 2");
      await first().pool.query("UPDATE counter SET n = 5 WHERE id = 2");
      await everywhere(nodes, "SELECT n FROM counter WHERE id = 2", 5);
      await connection.query("SAVEPOINT later");
      await connection.query("INSERT INTO upload (who) VALUES ('half')");
      await connection.commit();
      connection.release();
      await everywhere(nodes, "SELECT count(*) FROM upload", 1);
      expect(await number(second(), "SELECT n FROM counter WHERE id = 2")).toBe(5);
    });

    test("a conflict at COMMIT is told, and is run again", async () => {
      for (let i = 0; i < 5; i++) {
        const entered = Promise.withResolvers<void>();
        const done = Promise.withResolvers<void>();
        const late = caught(
          second().hf.transaction({ retry: false }, async (tx) => {
            await tx.client.query("UPDATE counter SET n = n + 10 WHERE id = 1");
            entered.resolve();
            await second().hf.outside(() => done.promise);
          }),
        );
        await entered.promise;
        await first().pool.query("UPDATE counter SET n = n + 1 WHERE id = 1");
        done.resolve();
        expect(await late).toBeInstanceOf(SerializationError);
      }
      await everywhere(nodes, "SELECT n FROM counter WHERE id = 1", 5);
      const add = ({ hf }: Node) =>
        hf.transaction(
          async (tx) => void (await tx.client.query("UPDATE counter SET n = n + 1 WHERE id = 1")),
        );
      await Promise.all(nodes.flatMap((node) => Array.from({ length: 10 }, () => add(node))));
      await everywhere(nodes, "SELECT n FROM counter WHERE id = 1", 5 + nodes.length * 10);
    });

    // The last of all: it stays so.
    describe("with one primary from now on", () => {
      const fresh = (node: Node) => holdfast(fromMysql2(node.pool), { hazards: "count" });

      test("that one has locks of every kind, and the other one is refused as a replica", async () => {
        const [url = ""] = group.urls;
        const admin = await mysql.createConnection(url);
        await admin.query("SELECT group_replication_switch_to_single_primary_mode(@@server_uuid)");
        await admin.end();
        const [primary, secondary] = nodes as [Node, Node];
        await eventually(async () => expect(await number(secondary, "SELECT @@super_read_only")).toBe(1));

        const hf = fresh(primary);
        expect(await hf.capabilities()).toMatchObject({
          exclusion: "held",
          sessionLocks: "session advisory",
          leases: true,
        });
        expect(await hf.tryLock(key("job"), async () => "done")).toEqual({ acquired: true, value: "done" });
        await (await hf.hold(key("job"))).release();
        await (await hf.lease(key("job"))).release();

        await expect(fresh(secondary).capabilities()).rejects.toThrow(ReplicaError);
        await hf.close();
      });

      test("nor is a lock of a session given by it, to who has met the primary first and may write everywhere", async () => {
        const pools = group.urls.map((each) =>
          mysql.createPool({ uri: Object.assign(new URL(each), { pathname: "/shop" }).href }),
        );
        const [primary, secondary] = pools as [Pool, Pool];
        let at = primary;
        const hf = holdfast(fromMysql2({ getConnection: () => at.getConnection() }), {
          hazards: "count",
        });
        try {
          await (await hf.hold(key("job"))).release();
          // Else its row would have to be made, which is refused anyway.
          const there = "SELECT count(*) FROM holdfast_lock WHERE name = 'job'";
          await eventually(async () => expect(await number(second(), there)).toBe(1));
          at = secondary;
          await expect(hf.transaction({ lock: key("job") }, async () => {})).rejects.toThrow(ReplicaError);
          await secondary.query("SET GLOBAL super_read_only = OFF");
          await expect(hf.hold(key("job"))).rejects.toThrow(ReplicaError);
          at = primary;
          await (await hf.hold(key("job"))).release();
        } finally {
          await hf.close();
          for (const pool of pools) await pool.end();
        }
      });
    });
  },
);
