/** What scripts rely on, of every verb: exit codes, and one object of JSON, whatever happens. */
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type Outcome, command, start } from "./harness/command.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

interface TestDatabase {
  readonly url: string;
}

let server: EmbeddedPostgres;
let full: TestDatabase;
let empty: TestDatabase;

async function created(name: string): Promise<TestDatabase> {
  await server.createDatabase(name);
  return { url: server.url(name) };
}

beforeAll(async () => {
  // Of its own: other tests look for what bench and race have left on theirs.
  server = await startPostgres({ settings: { fsync: "off" } });
  full = await created("test_full");
  empty = await created("test_empty");
  for (const { url } of [full, empty]) {
    const pool = new Pool({ connectionString: url });
    const hf = holdfast(fromPg(pool));
    await hf.migrate();
    if (url === full.url) {
      await queue(hf, "emails").enqueue({ to: "ada" });
      await quota(hf, { name: "units", limit: 100 }).consume("ada", 7);
      await stock(hf).increase("CAP", 5);
      const report = schedule(hf, "report", { every: "1 hour" }, () => {});
      await report.start();
      await report.stop();
    }
    await hf.close();
    await pool.end();
  }
});

afterAll(async () => {
  await server?.stop();
});

const on = ({ url }: TestDatabase, ...args: string[]): Promise<Outcome> =>
  command(args, { env: { DATABASE_URL: url } });

interface Told extends Record<string, unknown> {
  readonly error?: { readonly message: string; readonly exitCode: number; readonly code?: string };
}

/** One line, an object. */
function object({ out, err }: Outcome): Told {
  expect(out, err).toMatch(/^\{.*\}\n$/);
  return JSON.parse(out) as Told;
}

describe("a name that is none: 2, one line, and an object that says so", () => {
  test.each([
    ["nosuch"],
    ["queue nosuch"],
    ["queue show nosuch"],
    ["queue job nosuch 1"],
    ["queue jobs nosuch"],
    ["queue retry nosuch --all --yes"],
    ["queue discard nosuch 1 --yes"],
    ["queue prune nosuch --before 1d --yes"],
    ["queue pause nosuch --yes"],
    ["schedule nosuch"],
    ["schedule show nosuch"],
    ["schedule pause nosuch --yes"],
    ["quota nosuch"],
    ["quota show nosuch"],
    ["quota show units nosuch"],
    ["quota history nosuch ada"],
    ["quota grant nosuch ada 1 --yes"],
    ["quota grants nosuch ada"],
    ["quota grants units nosuch"],
    ["quota revoke units ada nosuch --yes"],
    ["quota revoke nosuch ada x --yes"],
    ["quota limit units nosuch 1 --yes"],
    ["quota refund units ada nosuch --yes"],
    ["quota reconcile nosuch"],
    ["stock nosuch"],
    ["stock --name nosuch"],
    ["stock --sku nosuch"],
    ["stock --sku CAP nosuch"],
    ["stock --location nosuch"],
    ["stock history nosuch"],
    ["stock history --name nosuch"],
    ["stock channels nosuch"],
    ["stock channels --name nosuch"],
    ["stock adjust nosuch 1 --yes"],
    ["stock reconcile nosuch"],
    ["stock reconcile --name nosuch"],
    ["migrate nosuch"],
    ["migrate print --engine nosuch"],
    ["bench nosuch"],
    ["bench nosuch --list"],
    ["doctor --only nosuch"],
    ["demo --only nosuch"],
    ["race test/races/command/quota.ts --only nosuch"],
    ["race nosuch.ts"],
    ["kill 2147483647 --yes"],
    ["kill nosuch --yes"],
    ["lease show nosuch"],
    ["lease end nosuch --yes"],
    ["lease end --fence 2147483647 --yes"],
  ])("%s", async (line) => {
    const words = line.split(" ");
    const plain = await on(/CAP|units/.test(line) ? full : empty, ...words);
    expect(plain.code, plain.out + plain.err).toBe(2);
    expect(plain.err).toMatch(/^(holdfast|error): .+/m);
    const told = await on(full, ...words, "--json");
    expect(told.code).toBe(2);
    const { error } = object(told);
    expect(error).toMatchObject({ message: expect.stringMatching(/nosuch|2147483647/), exitCode: 2 });
    expect(told.err).toContain(error?.message);
  });

  test("what there is of the others is told all the same", async () => {
    const told = object(await on(full, "stock", "--sku", "CAP", "nosuch", "--json"));
    expect(told).toMatchObject({
      levels: [{ sku: "CAP" }],
      error: { message: 'There is no SKU "nosuch".' },
    });
  });
});

describe("--json is one object", () => {
  test.each([
    ["locks"],
    ["locks --blocked"],
    ["keys"],
    ["keys image-upload:42"],
    ["keys --find 12", 1],
    ["doctor"],
    ["doctor --list"],
    ["migrate --yes"],
    ["migrate status"],
    ["migrate print"],
    ["queue"],
    ["queue show emails"],
    ["queue jobs emails"],
    ["queue jobs emails --state failed"],
    ["queue job emails 1"],
    ["queue job emails 999", 1],
    ["queue retry emails 999 --yes", 1],
    ["queue discard emails 999 --yes", 1],
    ["queue prune emails --before 1d --yes"],
    ["queue pause emails --yes"],
    ["queue resume emails --yes"],
    ["schedule"],
    ["schedule show report"],
    ["schedule pause report --yes"],
    ["schedule resume report --yes"],
    ["quota"],
    ["quota show units"],
    ["quota show units ada"],
    ["quota history units ada"],
    ["quota grant units ada 5 --yes"],
    ["quota grants units ada"],
    ["quota limit units ada 50 --yes"],
    ["quota reconcile units"],
    ["stock"],
    ["stock history"],
    ["stock add CAP 1 --yes"],
    ["stock adjust CAP 3 --yes"],
    ["stock channels"],
    ["stock reconcile"],
    ["lease"],
    ["audit"],
    ["bench --list"],
    ["bench locks --seconds 0.05 --connections 2 --yes"],
    ["race test/races/command/quota.ts --only naive", 1],
    ["race test/races/command/quota.ts --only locked"],
  ])("%s", async (line, code?: number) => {
    const outcome = await on(full, ...line.split(" "), "--json");
    if (!line.startsWith("doctor")) expect(outcome.code, outcome.err).toBe(code ?? 0);
    expect(object(outcome)).not.toHaveProperty("error");
  });

  test.each([
    ["no database is named", ["queue", "--json"], {}],
    ["nobody is there", ["locks", "--json"], { DATABASE_URL: "postgres://127.0.0.1:1/x" }],
    ["an option that is none", ["doctor", "--json", "--no-such-option"], {}],
    ["a value that is none", ["queue", "show", "emails", "--limit", "0", "--json"], {}],
    ["an argument is missing", ["quota", "history", "--json"], {}],
    ["nobody to be asked", ["queue", "pause", "emails", "--json"], undefined],
  ])("also if it could not be done: %s", async (_, args, env) => {
    const outcome = await command(args, { env: env ?? { DATABASE_URL: full.url } });
    expect(outcome.code).toBe(2);
    const { error } = object(outcome);
    expect(error).toMatchObject({ message: expect.any(String), exitCode: 2 });
    expect(outcome.err).toContain(error?.message);
  });

  test("with the code of an error of Holdfast's", async () => {
    const outcome = await on(await created("test_bare"), "queue", "--json");
    expect(outcome.code).toBe(2);
    expect(object(outcome)).toMatchObject({ error: { code: "HF_SCHEMA_MISSING" } });
  });

  test("of several sessions, with what could not be ended", async () => {
    const victim = new Client({ connectionString: full.url });
    victim.on("error", () => {});
    await victim.connect();
    await victim.query("SELECT pg_advisory_lock(42)");
    const { rows } = await victim.query("SELECT pg_backend_pid() AS pid");
    const outcome = await on(full, "kill", String(rows[0].pid), "2147483647", "--yes", "--json");
    expect(outcome.code).toBe(2);
    expect(object(outcome)).toMatchObject({
      sessions: [{ session: String(rows[0].pid), done: "terminated" }],
      error: { message: expect.stringContaining("2147483647"), exitCode: 2 },
    });
    await victim.end().catch(() => {});
  });

  test("and if it is stopped", async () => {
    const holder = start(["hold", "door"], { env: { DATABASE_URL: full.url } });
    await eventually(() => {
      expect(holder.out()).toContain("is held");
    });
    const waiter = start(["hold", "door", "--json"], { env: { DATABASE_URL: full.url } });
    await eventually(() => {
      expect(waiter.err()).toContain("waiting");
    });
    waiter.child.kill("SIGINT");
    const outcome = await waiter.done;
    expect(outcome.code).toBe(130);
    expect(object(outcome)).toMatchObject({ error: { exitCode: 130 } });
    holder.child.kill("SIGINT");
    expect((await holder.done).code).toBe(0);
  });
});

describe("at a question in a terminal", () => {
  const questions: readonly (readonly [line: string, question: RegExp])[] = [
    ["queue pause emails", /Pause queue "emails"\?.*\(y\/N\)/s],
    ["schedule pause report", /Pause schedule "report"\?.*\(y\/N\)/s],
    ["quota grant units ada 5", /Grant 5 credits.*\(y\/N\)/s],
    ["stock add CAP 3", /Add 3 to "CAP".*\(y\/N\)/s],
    ["bench locks", /removed afterwards\? \(y\/N\)/],
    ["race test/races/command/quota.ts --only naive --in-place --url", /"test_\w+" itself.*\(y\/N\)/s],
  ];
  const typed = (line: string): string[] => [
    ...line.split(" "),
    ...(line.endsWith("--url") ? [full.url] : []),
  ];

  const changes = async (): Promise<unknown> => object(await on(full, "audit", "--json"))["lines"];

  test.each(questions)("%s: Ctrl-C is 130, no is 1, and nothing is changed", async (line, question) => {
    const before = await changes();
    const env = { DATABASE_URL: full.url };
    for (const [keys, code] of [
      ["\x03", 130],
      ["n\r", 1],
    ] as const) {
      const screen = terminal(typed(line), { env, columns: 400 });
      await screen.until(question);
      screen.type(keys);
      expect(await screen.ended, await screen.all()).toBe(code);
    }
    expect(await changes()).toEqual(before);
  });

  test("kill, and migrate", async () => {
    const victim = new Client({ connectionString: full.url });
    await victim.connect();
    const { rows } = await victim.query("SELECT pg_backend_pid() AS pid");
    const bare = await created("test_unmigrated");
    try {
      for (const [args, question, env] of [
        [["kill", String(rows[0].pid)], /End session \d+\?.*\(y\/N\)/, full.url],
        [["migrate"], /Apply .*\(y\/N\)/, bare.url],
      ] as const) {
        const screen = terminal(args, { env: { DATABASE_URL: env }, columns: 200 });
        await screen.until(question);
        screen.type("\x03");
        expect(await screen.ended).toBe(130);
      }
      expect((await victim.query("SELECT 1 AS one")).rows).toEqual([{ one: 1 }]);
      expect((await on(bare, "migrate", "status")).code).toBe(1);
    } finally {
      await victim.end();
    }
  });
});
