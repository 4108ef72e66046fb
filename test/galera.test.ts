import {
  type Holdfast,
  SerializationError,
  ServerUnavailableError,
  UnsupportedError,
  holdfast,
  isRetryable,
  key,
  once,
} from "holdfast";
import { fromKnex } from "holdfast/knex";
import { fromMysql2 } from "holdfast/mysql2";
import { fromSequelize } from "holdfast/sequelize";
import makeKnex from "knex";
import mysql, { type PoolConnection, type RowDataPacket } from "mysql2/promise";
import { Sequelize } from "sequelize";
import { describe, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { caught, clusterCases, everywhere, number } from "./harness/cluster-cases.ts";
import { unavailable } from "./harness/databases.ts";
import { noGalera, startGalera } from "./harness/galera.ts";
import type { StartedCluster } from "./harness/started-server.ts";
import { eventually } from "./harness/wait.ts";

let cluster: StartedCluster;

clusterCases(
  {
    name: "Galera",
    unavailable: unavailable("mariadb") ?? noGalera(),
    start: async () => (cluster = await startGalera()),
    called: /this is a cluster \(Galera\)/,
    locks: "at commit",
  },
  (place, { first, second }) => {
    const increment = (hf: Holdfast<PoolConnection>) =>
      hf.transaction({ lock: key("counter", 1) }, async (tx) => {
        const [rows] = await tx.client.query<RowDataPacket[]>("SELECT n FROM counter WHERE id = 1");
        await tx.client.query("UPDATE counter SET n = ? WHERE id = 1", [Number(rows[0]?.["n"]) + 1]);
      });

    test("a counter that is read and written under a lock loses nothing", async () => {
      const [workers, each] = [3, 5];
      await Promise.all(
        place.nodes.flatMap(({ hf }) =>
          Array.from({ length: workers }, async () => {
            for (let i = 0; i < each; i++) await increment(hf);
          }),
        ),
      );
      await everywhere(
        place.nodes,
        "SELECT n FROM counter WHERE id = 1",
        place.nodes.length * workers * each,
      );
    });

    // Where nobody has locked the key before, its row has to be made.
    test.each(["returns", "throws"] as const)(
      "a limit is kept by those who count, insert, and otherwise %s",
      async (how) => {
        const limit = 4;
        const full = new Error("full");
        const upload = async (hf: Holdfast<PoolConnection>, who: string) =>
          hf.transaction({ lock: key("limit", how) }, async (tx) => {
            const [rows] = await tx.client.query<RowDataPacket[]>("SELECT count(*) AS n FROM upload");
            if (Number(rows[0]?.["n"]) >= limit) {
              if (how === "throws") throw full;
              return false;
            }
            await tx.client.query("INSERT INTO upload (who) VALUES (?)", [who]);
            return true;
          });
        const answers = await Promise.all(
          place.nodes.flatMap(({ hf }, node) =>
            Array.from({ length: 4 }, (_, i) =>
              upload(hf, `${node}-${i}`).catch((error: unknown) => {
                if (error !== full) throw error;
                return false;
              }),
            ),
          ),
        );
        expect(answers.filter(Boolean)).toHaveLength(limit);
        await everywhere(place.nodes, "SELECT count(*) FROM upload", limit);
      },
    );

    const poor = new Error("there is not enough");

    /**
     * Something is committed on the first node, under the lock, and the second one does not show it: it has something else to
     * do before, which it cannot until `saw` is called. Returns what bodies there have seen.
     */
    async function whileBehind(
      lock: ReturnType<typeof key>,
      work: (saw: (n: unknown) => void) => Promise<unknown>,
    ): Promise<readonly number[]> {
      const seen: number[] = [];
      const stopper = await second().pool.getConnection();
      try {
        await stopper.query("LOCK TABLES backlog READ");
        await first().pool.query("INSERT INTO backlog (filler) VALUES ('x')");
        await first().hf.transaction({ lock }, async (tx) => {
          await tx.client.query("UPDATE counter SET n = 100 WHERE id = 1");
        });
        await work((n) => {
          seen.push(Number(n));
          if (seen.length === 1) void stopper.query("UNLOCK TABLES");
        });
      } finally {
        await stopper.query("UNLOCK TABLES");
        stopper.release();
      }
      await everywhere(place.nodes, "SELECT n FROM counter WHERE id = 1", 100);
      return seen;
    }

    /** The row of a lock is there, or has to be made. */
    async function someLock(there: boolean): Promise<ReturnType<typeof key>> {
      const lock = key("account", String(Math.random()));
      if (there) await second().hf.transaction({ lock }, async () => {});
      return lock;
    }

    describe.each([
      ["a known key", true],
      ["a new key", false],
    ])("with %s", (_, there) => {
      test("what a body throws because of a read that was too old is not believed", async () => {
        const lock = await someLock(there);
        const seen = await whileBehind(lock, (saw) =>
          second().hf.transaction({ lock }, async (tx) => {
            const [rows] = await tx.client.query<RowDataPacket[]>("SELECT n FROM counter WHERE id = 1");
            await tx.client.query("INSERT INTO upload (who) VALUES ('once')");
            saw(rows[0]?.["n"]);
            if (rows[0]?.["n"] !== 100) throw poor;
          }),
        );
        expect([seen[0], seen.at(-1)]).toEqual([0, 100]);
        await everywhere(place.nodes, "SELECT count(*) FROM upload", 1);
      });

      test("nor what a nested one throws, whose lock is undone with it", async () => {
        const lock = await someLock(there);
        const answers: boolean[] = [];
        const seen = await whileBehind(lock, async (saw) => {
          const enough = await second().hf.transaction(async (tx) => {
            await tx.client.query("INSERT INTO upload (who) VALUES ('outer')");
            const inner = tx.transaction({ lock }, async ({ client }) => {
              const [rows] = await client.query<RowDataPacket[]>("SELECT n FROM counter WHERE id = 1");
              saw(rows[0]?.["n"]);
              if (rows[0]?.["n"] !== 100) throw poor;
            });
            return inner.then(
              () => true,
              (error: unknown) => {
                if (error !== poor) throw error;
                return false;
              },
            );
          });
          answers.push(enough);
        });
        expect([seen[0], seen.at(-1)]).toEqual([0, 100]);
        expect(answers).toEqual([true]);
        await everywhere(place.nodes, "SELECT count(*) FROM upload", 1);
      });

      test("nor with a client that ends transactions itself", async () => {
        const lock = await someLock(there);
        const knex = makeKnex({ client: "mysql2", connection: second().url, pool: { min: 0, max: 4 } });
        try {
          const hf = holdfast(fromKnex(knex), { hazards: "count" });
          const seen = await whileBehind(lock, (saw) =>
            hf.transaction({ lock }, async (tx) => {
              const row = await tx.client("counter").where({ id: 1 }).first<{ n: number }>("n");
              await tx.client("upload").insert({ who: "knex" });
              saw(row?.n);
              if (row?.n !== 100) throw poor;
            }),
          );
          expect([seen[0], seen.at(-1)]).toEqual([0, 100]);
          await everywhere(place.nodes, "SELECT count(*) FROM upload", 1);
          await hf.close();
        } finally {
          await knex.destroy();
        }
      });
    });

    test("a client's own hooks are not called for a body that threw", async () => {
      const sequelize = new Sequelize(second().url, { logging: false, dialect: "mysql" });
      const hf = holdfast(fromSequelize(sequelize), { hazards: "count" });
      const called: string[] = [];
      try {
        const error = await caught(
          hf.transaction({ lock: key("alone") }, async (tx) => {
            tx.client.afterCommit(() => void called.push("hook"));
            await sequelize.query("INSERT INTO upload (who) VALUES ('undone')", { transaction: tx.client });
            throw poor;
          }),
        );
        expect([error, called]).toEqual([poor, []]);
        expect(await number(second(), "SELECT count(*) FROM upload")).toBe(0);
      } finally {
        await hf.close();
        await sequelize.close();
      }
    });

    test("a body that throws leaves nothing but its turn, and its error is the caller's", async () => {
      const { hf, pool } = second();
      for (const nested of [false, true]) {
        const error = await caught(
          hf.transaction({ lock: key("thrown", String(nested)) }, async (tx) => {
            await tx.client.query("INSERT INTO upload (who) VALUES ('first')");
            await tx.lock(key("thrown", "late"));
            if (nested) await tx.transaction({ lock: key("thrown", "inner") }, () => Promise.reject(poor));
            throw poor;
          }),
        );
        expect(error).toBe(poor);
      }
      expect(await number(second(), "SELECT count(*) FROM upload")).toBe(0);
      const [rows] = await pool.query<RowDataPacket[]>(
        "SELECT count(*) AS n FROM holdfast_lock WHERE turn > 0 AND name LIKE 'thrown%'",
      );
      expect(Number(rows[0]?.["n"])).toBe(4);
    });

    test("once runs its effects once", async () => {
      const id = ["event", String(Math.random())];
      const answers = await Promise.all(
        place.nodes.flatMap(({ hf }, node) =>
          [1, 2].map(() =>
            once(hf, id, async (tx) => {
              await tx.client.query("INSERT INTO upload (who) VALUES ('once')");
              return node;
            }),
          ),
        ),
      );
      expect(new Set(answers.map(({ value }) => value)).size).toBe(1);
      expect(answers.filter(({ replayed }) => !replayed)).toHaveLength(1);
      await everywhere(place.nodes, "SELECT count(*) FROM upload", 1);
    });

    test("who commits second is run again, or told so", async () => {
      for (let i = 0; i < 5; i++) {
        const entered = Promise.withResolvers<void>();
        const done = Promise.withResolvers<void>();
        const late = caught(
          second().hf.transaction({ lock: key("counter", 1), retry: false }, async (tx) => {
            await tx.client.query("UPDATE counter SET n = n + 10 WHERE id = 1");
            entered.resolve();
            await second().hf.outside(() => done.promise);
          }),
        );
        await entered.promise;
        await increment(first().hf);
        done.resolve();
        const error = await late;
        expect(error).toBeInstanceOf(SerializationError);
        expect(error).toMatchObject({
          retryable: true,
          message: expect.stringContaining("Another node committed first") as string,
        });
      }
      await everywhere(place.nodes, "SELECT n FROM counter WHERE id = 1", 5);
    });

    // Several that make the same view would stand still for ever, and every writer with them: not each time, so it is tried often.
    test("is migrated from all nodes at once", async () => {
      const admin = await mysql.createConnection(cluster.urls[0] as string);
      for (let round = 0; round < 5; round++) {
        await admin.query(`CREATE DATABASE fresh${round}`);
        await admin.query(`GRANT ALL PRIVILEGES ON fresh${round}.* TO 'app'@'%'`);
        const fresh = place.nodes.map(({ url }) =>
          mysql.createPool({ uri: Object.assign(new URL(url), { pathname: `/fresh${round}` }).href }),
        );
        try {
          for (const pool of fresh) await eventually(() => pool.query("SELECT 1").then(() => true));
          const all = fresh.map((pool) => holdfast(fromMysql2(pool)));
          await Promise.all(all.map((hf) => hf.migrate()));
          for (const hf of all) {
            const states = async () => new Set((await hf.migrations()).map(({ state }) => state));
            await eventually(async () => expect(await states()).toEqual(new Set(["applied"])));
          }
        } finally {
          for (const pool of fresh) await pool.end();
        }
      }
      await admin.end();
    });

    test("a process that died while it migrated is waited for, and then not", async () => {
      const { hf, pool } = first();
      await pool.query(
        "INSERT INTO holdfast_migration (id, name, applied_at) VALUES (0, 'under way', CURRENT_TIMESTAMP - INTERVAL 57 SECOND)",
      );
      await hf.migrate();
      expect(await number(first(), "SELECT count(*) FROM holdfast_migration WHERE id = 0")).toBe(0);
      expect((await hf.migrations()).map(({ state }) => state)).not.toContain("unknown");
    });

    test("the command runs nothing under a lock that would not be held", async () => {
      for (const more of [[], ["--lease"]]) {
        const args = ["exec", "--lock", "job", ...more, "--url", first().url, "--", "echo", "it ran"];
        const { code, out, err } = await command(args);
        expect([code === 0, out]).toEqual([false, ""]);
        expect(err).toMatch(/exclude\s+at\s+COMMIT\s+only/);
      }
    });

    test("the doctor names it", async () => {
      const { out } = await command(["doctor", "--only", "galera", "--url", first().url]);
      expect(out).toMatch(/wsrep_on is ON \(cluster holdfast\)[^]*hf\.tryLock/);
    });

    test("who asks whether somebody has a lock is told why there is no answer", async () => {
      const error = await caught(first().hf.tryLock(key("job"), async () => {}));
      expect(error).toBeInstanceOf(UnsupportedError);
      expect(String(error)).toMatch(/hf\.tryLock: this is a cluster with several writers.*at COMMIT only/);
    });

    test("a node that takes no statements is told of, and the same is tried again elsewhere", async () => {
      const [, , url = ""] = cluster.urls;
      const admin = await mysql.createConnection(url);
      const pool = mysql.createPool({ uri: Object.assign(new URL(url), { pathname: "/shop" }).href });
      const hf = holdfast(fromMysql2(pool));
      try {
        await hf.transaction({ lock: key("node") }, async () => {});
        await admin.query("SET GLOBAL wsrep_reject_queries = ALL");
        const error = await hf.transaction({ lock: key("node") }, async () => {}).catch((e: unknown) => e);
        expect(error).toBeInstanceOf(ServerUnavailableError);
        expect(error).toMatchObject({ code: "HF_UNAVAILABLE", cause: { errno: 1047 } });
        const [raw] = [await pool.query("SELECT 1 FROM counter").catch((e: unknown) => e)];
        expect([hf.classify(raw), isRetryable(raw)]).toEqual(["unavailable", true]);
        // Comes back while it is tried again.
        let attempts = 0;
        const running = hf.transaction(
          { lock: key("node"), retry: { attempts: 200, maxMs: 50 } },
          async (tx) => {
            attempts = tx.attempt;
          },
        );
        await admin.query("SET GLOBAL wsrep_reject_queries = NONE");
        await running;
        expect(attempts).toBeGreaterThan(0);
      } finally {
        await admin.query("SET GLOBAL wsrep_reject_queries = NONE");
        await admin.end();
        await hf.close();
        await pool.end();
      }
    });
  },
);
