/**
 * A splitter of reads and writes, a balancer and a cache, between Holdfast and a primary whose standby shows what was there a while ago. What
 * is asked through them is answered as the primary answers it, or refused with HF_REPLICA.
 */
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type EmbeddedPostgres, startPostgres } from "../packages/cli/src/embedded.ts";
import {
  type Any,
  type Ground,
  after,
  answers,
  before,
  giveBack,
  questions,
  uploads,
} from "./harness/pattern-answers.ts";
import { type Balancer, type Splitter, startBalancer, startSplitter } from "./harness/splitter.ts";
import { type Standby, primarySettings, startStandby } from "./harness/standby.ts";

let primary: EmbeddedPostgres;
let standby: Standby;
let splitter: Splitter;
let balancer: Balancer;
/** On the primary itself. */
let pool: Pool;
let direct: Any;
const restarts: (() => unknown)[] = [];
const ground = (): Ground => ({ direct, query: (text) => pool.query(text) });

/** The same again, for another way to ask. */
async function reset(): Promise<void> {
  await direct.inspect();
  await giveBack();
  await standby.resume();
  await pool.query("DROP TABLE IF EXISTS account");
  await pool.query("DROP SCHEMA IF EXISTS holdfast CASCADE");
  await direct.close();
  direct = holdfast(fromPg(pool));
  await direct.migrate();
  await before(ground());
  await standby.caughtUp();
  await standby.pause();
}

beforeAll(async () => {
  primary = await startPostgres({ settings: primarySettings });
  pool = new Pool({ connectionString: primary.url() }).on("error", () => {});
  direct = holdfast(fromPg(pool));
  standby = await startStandby(primary);
  splitter = await startSplitter({ primary: primary.url(), standby: standby.url() });
  balancer = await startBalancer([primary.url()]);
});

afterAll(async () => {
  await giveBack();
  await direct?.close();
  await pool?.end();
  await splitter?.close();
  await balancer?.close();
  await standby?.stop();
  await primary?.stop();
});

afterEach(async () => {
  for (const end of restarts.splice(0).toReversed()) await end();
});

const clients: Record<string, (url: string) => Any> = {
  pg: (url) => {
    const through = new Pool({ connectionString: url, max: 4 }).on("error", () => {});
    through.on("error", () => {});
    restarts.push(() => through.end());
    return holdfast(fromPg(through));
  },
  "postgres.js": (url) => {
    const through = postgres(url, { max: 4, prepare: false });
    restarts.push(() => through.end({ timeout: 1 }));
    return holdfast(fromPostgres(through));
  },
};

function open(client: string, url: string): Any {
  const hf = (clients[client] as (url: string) => Any)(url);
  restarts.push(() => hf.close());
  return hf;
}

test("directly everything is as it is", async () => {
  await reset();
  await after(ground());
  expect((await answers(open("pg", primary.url()), direct)).wrong).toEqual([]);
}, 60_000);

for (const client of Object.keys(clients)) {
  test.for(["standby", "turns"] as const)(
    `${client}: a splitter that reads from the %s`,
    { timeout: 120_000 },
    async (reads) => {
      await reset();
      splitter.reads = "primary";
      const hf = open(client, splitter.url);
      await hf.capabilities();
      await hf.transaction({ lock: key("any") }, async () => {});
      await after(ground());
      splitter.answered.length = 0;
      splitter.reads = reads;
      const tally = await answers(hf, direct);
      splitter.reads = "primary";
      expect(tally.wrong).toEqual([]);
      expect(tally.exact.length).toBeGreaterThan(0);
      // The standby has answered nothing that reads a table or calls a routine. A session may have named itself there.
      expect(splitter.answered.filter((text) => /\bFROM\b|\bholdfast"?\./.test(text))).toEqual([]);
    },
  );

  test.for(["the standby", "each in turn"])(
    `${client}: a balancer that leads to %s`,
    { timeout: 120_000 },
    async (where) => {
      await reset();
      balancer.to = [primary.url()];
      const hf = open(client, balancer.url);
      await hf.capabilities();
      await hf.transaction({ lock: key("any") }, async () => {});
      await after(ground());
      balancer.to = where === "the standby" ? [standby.url()] : [primary.url(), standby.url()];
      const tally = await answers(hf, direct, () => balancer.drop());
      expect(tally.wrong).toEqual([]);
      if (where !== "the standby") expect(tally.exact.length).toBeGreaterThan(0);
      else expect(tally.refused.length).toBeGreaterThan(0);
    },
  );
}

describe("a cache", () => {
  beforeEach(async () => {
    await reset();
    splitter.caches = true;
    restarts.push(() => (splitter.caches = false));
    // Somebody else has asked.
    const other = open("pg", splitter.url);
    for (const { ask, reads } of Object.values(questions)) if (reads) await ask(other).catch(() => {});
    await after(ground());
  }, 120_000);

  test("is refused", { timeout: 120_000 }, async () => {
    const tally = await answers(open("pg", splitter.url), direct);
    expect(tally).toMatchObject({ wrong: [], exact: [] });
    const refused = uploads(open("pg", splitter.url)).peek("peeked");
    await expect(refused).rejects.toThrow(/^A cache stands between this client and the server/);
  });

  test("is refused, too, when the first use was inside of a transaction of the caller's", async () => {
    const through = new Pool({ connectionString: splitter.url }).on("error", () => {});
    restarts.push(() => through.end());
    const hf = holdfast(fromPg(through));
    restarts.push(() => hf.close());
    const client = await through.connect();
    await client.query("BEGIN");
    expect((await uploads(hf).peek("peeked", { tx: hf.join(client) })).used).toBe(4);
    await client.query("COMMIT");
    client.release();
    await expect(uploads(hf).peek("peeked")).rejects.toMatchObject({ code: "HF_REPLICA" });
  });
});
