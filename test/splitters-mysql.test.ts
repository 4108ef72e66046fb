/** The same as `splitters.test.ts`, on MySQL and MariaDB. */
import { holdfast, key } from "holdfast";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { createPool } from "mariadb";
import mysql from "mysql2/promise";
import { afterAll, afterEach, beforeAll, describe, expect, test } from "vitest";
import { unavailable } from "./harness/databases.ts";
import { type PairUser, type ReplicatedPair, startPair } from "./harness/mysql-replica.ts";
import { startMysqlSplitter } from "./harness/mysql-splitter.ts";
import { type Any, after, answers, before, giveBack, questions, uploads } from "./harness/pattern-answers.ts";
import { type Balancer, type Splitter, startBalancer } from "./harness/splitter.ts";

const ends: (() => unknown)[] = [];

const clients: Record<string, (url: string) => Any> = {
  mysql2: (url) => {
    const through = mysql.createPool({ uri: url, connectionLimit: 4 });
    ends.push(() => through.end());
    return holdfast(fromMysql2(through));
  },
  mariadb: (url) => {
    const { hostname: host, port, username: user, password, pathname } = new URL(url);
    const through = createPool({
      host,
      port: Number(port),
      user,
      password,
      database: pathname.slice(1),
      connectionLimit: 4,
      allowPublicKeyRetrieval: true,
    });
    ends.push(() => through.end());
    return holdfast(fromMariadb(through));
  },
};

function open(client: string, url: string): Any {
  const hf = (clients[client] as (url: string) => Any)(url);
  ends.push(() => hf.close());
  return hf;
}

describe.each(["mysql", "mariadb"] as const)("%s", (server) => {
  let pair: ReplicatedPair;
  let direct: Any;
  let database = "";
  const splitters = {} as Record<PairUser, Splitter>;
  let balancer: Balancer;

  beforeAll(async () => {
    if (unavailable(server) !== undefined) return;
    pair = await startPair(server);
    for (const user of ["plain", "admin"] as const)
      splitters[user] = await startMysqlSplitter({
        primary: pair.primary(user, ""),
        standby: pair.replica(user, ""),
      });
    balancer = await startBalancer([pair.primary("plain", "")]);
  }, 180_000);

  afterAll(async () => {
    for (const splitter of Object.values(splitters)) await splitter.close();
    await balancer?.close();
    await pair?.stop();
  });

  afterEach(async () => {
    await giveBack();
    for (const end of ends.splice(0).toReversed()) await end();
    for (const splitter of Object.values(splitters))
      Object.assign(splitter, { reads: "primary", caches: false });
  });

  const ground = () => ({ direct, query: (text: string) => pair.admin.query(text) });
  const at = (url: string, user: PairUser) => {
    const it = new URL(url);
    it.username = user;
    it.pathname = `/${database}`;
    return it.href;
  };

  let count = 0;
  /** A database of its own, on both. */
  async function begin(skip: (condition: boolean, note?: string) => void): Promise<void> {
    skip(unavailable(server) !== undefined, unavailable(server));
    await pair.resume();
    database = `shop${++count}`;
    await pair.admin.query(`CREATE DATABASE ${database}`);
    await pair.admin.query(`USE ${database}`);
    direct = open("mysql2", pair.primary("plain", database));
    await direct.migrate();
    await before(ground());
    await pair.caughtUp();
    await pair.pause();
  }

  test("directly everything is as it is", { timeout: 60_000 }, async ({ skip }) => {
    await begin(skip);
    await after(ground());
    expect((await answers(open("mysql2", pair.primary("plain", database)), direct)).wrong).toEqual([]);
  });

  // On a replica that is read only, a user who may do anything can write.
  const cases = [
    ["mysql2", "plain"],
    ["mariadb", "admin"],
  ] as const;
  for (const [client, user] of cases) {
    test.for(["standby", "turns"] as const)(
      `${client}, ${user}: a splitter that reads from the %s`,
      { timeout: 120_000 },
      async (reads, { skip }) => {
        await begin(skip);
        const splitter = splitters[user];
        const hf = open(client, at(splitter.url, user));
        await hf.capabilities();
        await hf.transaction({ lock: key("any") }, async () => {});
        await after(ground());
        splitter.answered.length = 0;
        splitter.reads = reads;
        const tally = await answers(hf, direct);
        expect(tally.wrong).toEqual([]);
        expect(tally.exact.length).toBeGreaterThan(0);
        // What the replica has answered says nothing.
        expect(splitter.answered.filter((text) => /FROM (?!DUAL)|holdfast_/.test(text))).toEqual([]);
      },
    );

    test.for(["the replica", "each in turn"])(
      `${client}, ${user}: a balancer that leads to %s`,
      { timeout: 120_000 },
      async (where, { skip }) => {
        await begin(skip);
        const [primary, replica] = [pair.primary(user, database), pair.replica(user, database)];
        balancer.to = [primary];
        const hf = open(client, at(balancer.url, user));
        await hf.capabilities();
        await hf.transaction({ lock: key("any") }, async () => {});
        await after(ground());
        balancer.to = where === "the replica" ? [replica] : [primary, replica];
        const tally = await answers(hf, direct, () => balancer.drop());
        expect(tally.wrong).toEqual([]);
        expect((where === "the replica" ? tally.refused : tally.exact).length).toBeGreaterThan(0);
      },
    );

    test(`${client}, ${user}: a cache is refused`, { timeout: 120_000 }, async ({ skip }) => {
      await begin(skip);
      const splitter = splitters[user];
      splitter.caches = true;
      // Somebody else has asked.
      const other = open(client, at(splitter.url, user));
      for (const { ask, reads } of Object.values(questions)) if (reads) await ask(other).catch(() => {});
      await after(ground());
      const tally = await answers(open(client, at(splitter.url, user)), direct);
      expect(tally).toMatchObject({ wrong: [], exact: [] });
      const refused = uploads(open(client, at(splitter.url, user))).peek("peeked");
      await expect(refused).rejects.toThrow(/^A cache stands between this client and the server/);
    });
  }
});
