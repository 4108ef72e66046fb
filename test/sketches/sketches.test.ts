/** That they compile is the point; that they run shows that the shared code asks of them nothing more than their types. */
import { UnsupportedError, holdfast, key, sql } from "holdfast";
import { describe, expect, test } from "vitest";
import { type HttpSql, fromHttp } from "./http.ts";
import { type MongoClient, type MongoSession, fromMongo } from "./mongo.ts";
import { type MssqlRequest, type MssqlTransaction, fromMssql } from "./mssql.ts";

describe("SQL Server", () => {
  function fake(applock: () => number) {
    const log: string[] = [];
    class Transaction implements MssqlTransaction {
      begin = async (level?: number) => log.push(`begin ${level}`);
      commit = async () => void log.push("commit");
      rollback = async () => void log.push("rollback");
      on = () => {};
    }
    class Request implements MssqlRequest {
      readonly #inputs: Record<string, unknown> = {};
      input(name: string, value: unknown): this {
        this.#inputs[name] = value;
        return this;
      }
      async query(text: string) {
        if (!text.includes("SERVERPROPERTY")) log.push(text);
        return { recordset: [{ major: 16 }], rowsAffected: [1] };
      }
      async execute(procedure: string) {
        const { Resource: _, ...inputs } = this.#inputs;
        log.push([procedure, ...Object.values(inputs)].join(" "));
        return { returnValue: procedure === "sp_getapplock" ? applock() : 0 };
      }
      cancel = () => {};
    }
    return { log, hf: holdfast(fromMssql({ Transaction, Request }, { url: "" })), Transaction };
  }

  test("a transaction, its lock and a savepoint", async () => {
    const { hf, log, Transaction } = fake(() => 0);
    await hf.transaction({ lock: key("a"), wait: 100 }, async (tx) => {
      expect(tx.client).toBeInstanceOf(Transaction);
      await tx.query(sql`SELECT ${sql.id("a]b")} FROM t WHERE x = ${1}`);
      await tx
        .transaction(async () => {
          throw new Error("undone");
        })
        .catch(() => {});
    });
    expect(log.slice(-7)).toEqual([
      "begin 2",
      "sp_getapplock Exclusive Transaction 100",
      "INSERT INTO holdfast_commit (id) VALUES (@p1)",
      "SELECT [a]]b] FROM t WHERE x = @p1",
      "SAVE TRANSACTION holdfast_0_1",
      "ROLLBACK TRANSACTION holdfast_0_1",
      "commit",
    ]);
  });

  test("a lock that is taken, and a deadlock that is an answer", async () => {
    const answers = [-1];
    const { hf, log } = fake(() => answers.shift() ?? 0);
    expect(await hf.tryLock(key("a"), async () => 1)).toEqual({ acquired: false });
    expect(log.at(-1)).toBe("rollback");
    answers.push(0, -1);
    await hf.transaction(async (tx) => expect(await tx.tryLock([key("a"), key("b")])).toBe(false));
    expect(log.slice(-3)).toEqual([
      "sp_getapplock Exclusive Transaction 0",
      "sp_releaseapplock Transaction",
      "commit",
    ]);
    answers.push(-3);
    expect(await hf.transaction({ lock: key("a") }, async (tx) => tx.attempt)).toBe(2);
  });
});

describe("MongoDB", () => {
  function fake(conflicts: number) {
    const log: string[] = [];
    class Session implements MongoSession {
      #open = false;
      startTransaction() {
        this.#open = true;
        log.push("start");
      }
      async commitTransaction() {
        this.#open = false;
        log.push("commit");
      }
      async abortTransaction() {
        this.#open = false;
        log.push("abort");
      }
      endSession = async () => void log.push("end");
      inTransaction = () => this.#open;
    }
    let left = conflicts;
    const client: MongoClient<Session> = {
      startSession: () => new Session(),
      db: () => ({
        command: async () => ({ version: "8.0.0" }),
        collection: (name) => ({
          async updateOne() {
            log.push(name);
            if (left-- > 0) throw Object.assign(new Error("WriteConflict"), { code: 112 });
          },
        }),
      }),
    };
    return { log, hf: holdfast(fromMongo(client)), Session };
  }

  test("waits with a new transaction each time", async () => {
    const { hf, log, Session } = fake(2);
    await hf.lock(key("a"), async (tx) => {
      expect(tx.client).toBeInstanceOf(Session);
      log.push("body");
    });
    const once = ["start", "holdfast_lock", "abort"];
    expect(log).toEqual([...once, ...once, "start", "holdfast_lock", "body", "commit", "end"]);
  });

  test("has no SQL and no savepoints, and says so", async () => {
    const { hf } = fake(0);
    await hf.transaction(async (tx) => {
      await expect(tx.query(sql`SELECT 1`)).rejects.toThrow(/does not speak SQL; use tx\.client/);
      await expect(tx.transaction(async () => {})).rejects.toThrow(UnsupportedError);
    });
    await expect(hf.hold(key("a"))).rejects.toThrow(/keeps nothing for a session/);
    expect(hf.migrationSql()).toBe("");
  });
});

describe("a driver that speaks HTTP", () => {
  const client: HttpSql = {
    query: async () => [
      {
        number: "180004",
        version: "PostgreSQL 18.4",
        standby: false,
        isolation: "read committed",
        use: true,
        read: true,
      },
    ],
  };

  test("tells what it cannot do, and does not begin it", async () => {
    const hf = holdfast(fromHttp(client));
    const { version, transactionLocks, sessionLocks } = await hf.capabilities();
    expect(version).toBe("18.4");
    expect(transactionLocks).toMatchObject({ supported: false });
    expect(sessionLocks).toMatchObject({ supported: false });
    const body = async () => expect.unreachable();
    await expect(hf.transaction(body)).rejects.toThrow(UnsupportedError);
    await expect(hf.lock(key("a"), body)).rejects.toThrow(/request of its own/);
    await expect(hf.hold(key("a"))).rejects.toThrow(/request of its own/);
    expect(() => hf.join(client)).toThrow(/request of its own/);
  });
});
