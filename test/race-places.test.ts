/** Where `holdfast race` runs: in a database of its own, and never in somebody's by accident. */
import { randomBytes } from "node:crypto";
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import mysql from "mysql2/promise";
import { Client } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Outcome, type Running, command, start } from "./harness/command.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { LiveWriter } from "./harness/live-writer.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

const file = "test/races/command/account.ts";
const password = "open-sesame";

interface Told {
  readonly database: { readonly how: string; readonly name: string; readonly server?: string };
  readonly scenarios: readonly {
    readonly name: string;
    readonly status: string;
    readonly error?: { message: string };
  }[];
}

function told({ out, err }: Outcome): Told {
  expect(out, err).toMatch(/^\{.*\}\n$/);
  return JSON.parse(out) as Told;
}

/** One line that says why. */
function refusal({ code, out, err }: Outcome): string {
  expect(code, out + err).toBe(2);
  const [line, ...more] = err.split("\n").filter((each) => each.startsWith("holdfast: "));
  expect(more).toEqual([]);
  expect(err).not.toContain(password);
  return line ?? "";
}

describe("PostgreSQL", () => {
  let server: EmbeddedPostgres;
  let admin: Client;
  let database: { readonly name: string; readonly url: string };

  beforeAll(async () => {
    // Of its own: others look for what was made on the tests' server, too.
    server = await startPostgres({ settings: { fsync: "off" } });
    admin = new Client({ connectionString: server.url() });
    await admin.connect();
    const name = `test_${randomBytes(8).toString("hex")}`;
    await server.createDatabase(name);
    database = { name, url: server.url(name) };
    await inside(async (client) => {
      await client.query(`
        CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL);
        CREATE TABLE aside (id bigserial PRIMARY KEY, n bigint);
        INSERT INTO account VALUES (1, 100), (2, 0);
        INSERT INTO aside (n) SELECT 0 FROM generate_series(1, 800);
        ALTER DATABASE ${database.name} SET holdfast.told = 'a, "b"';
      `);
    });
  });

  afterEach(async () => {
    for (const name of await places()) await admin.query(`DROP DATABASE IF EXISTS ${name} WITH (FORCE)`);
    await inside((client) => client.query("DELETE FROM aside WHERE n > 0"));
  });

  afterAll(async () => {
    await admin?.end();
    await server?.stop();
  });

  /** For a moment: a session that stays would be in the way. */
  async function inside<T>(work: (client: Client) => Promise<T>): Promise<T> {
    const client = new Client({ connectionString: database.url });
    await client.connect();
    try {
      return await work(client);
    } finally {
      await client.end();
      await eventually(async () => {
        const { rows } = await admin.query(
          "SELECT 1 FROM pg_stat_activity WHERE datname = $1 AND application_name = ''",
          [database.name],
        );
        expect(rows).toEqual([]);
      });
    }
  }

  async function places(): Promise<string[]> {
    const { rows } = await admin.query<{ name: string }>(
      "SELECT datname AS name FROM pg_database WHERE datname ~ '^holdfast_race_' ORDER BY 1",
    );
    return rows.map(({ name }) => name);
  }

  /** Which version of which row, what was ever written, and what there is at all. */
  const everything = () =>
    inside(async (client) => {
      const rows = async (text: string) => (await client.query(text)).rows as unknown;
      return {
        account: await rows("SELECT ctid::text, xmin::text, * FROM account ORDER BY 1"),
        aside: await rows("SELECT ctid::text, xmin::text, * FROM aside ORDER BY 1"),
        sequence: await rows("SELECT last_value, is_called FROM aside_id_seq"),
        counted: await rows(
          "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables ORDER BY 1",
        ),
        relations: await rows(
          "SELECT oid::text, relname, relfilenode::text FROM pg_class WHERE oid >= 16384 ORDER BY 1",
        ),
      };
    });

  /** Of another user's. */
  async function as(rights: string): Promise<string> {
    const name = `race_${randomBytes(6).toString("hex")}`;
    await admin.query(`CREATE ROLE ${name} LOGIN PASSWORD '${password}' ${rights}`);
    const url = new URL(database.url);
    url.username = name;
    url.password = password;
    return url.href;
  }

  const race = (args: readonly string[], env: NodeJS.ProcessEnv = {}): Promise<Outcome> =>
    command(["race", file, ...args], { env: { DATABASE_URL: database.url, ...env } });

  async function underWay(args: readonly string[] = [], env: NodeJS.ProcessEnv = {}): Promise<Running> {
    const run = start(["race", file, "--only", "endless", ...args], {
      env: { DATABASE_URL: database.url, ...env },
    });
    const ended = run.done.then(({ code, out, err }) => {
      throw new Error(`It ended with ${code}, and was never under way:\n${out}${err}`);
    });
    const begun = eventually(() => {
      expect(run.err() + run.out()).toContain("under way");
    });
    await Promise.race([begun, ended]);
    ended.catch(() => {});
    return run;
  }

  describe("without a word of consent", () => {
    test("it runs in a copy, says so, and leaves everything as it was", async () => {
      const before = await everything();
      const outcome = await race(["--only", "fine", "--json"]);
      expect(outcome.code, outcome.err).toBe(0);
      const { database: used, scenarios } = told(outcome);
      expect(used).toMatchObject({
        how: "copy",
        name: expect.stringMatching(/^holdfast_race_[0-9a-f]{12}$/),
      });
      // It had its tables and rows, and what was set for the database.
      expect(scenarios).toMatchObject([{ name: "fine", status: "ok" }]);
      expect(outcome.err).toContain('told: a, "b"');
      expect(outcome.err).toContain(
        `In the database ${used.name}, a copy of "${database.name}", on postgres://`,
      );
      expect(outcome.err).toContain("(DATABASE_URL). It is removed afterwards.");
      expect(outcome.err).not.toContain(new URL(database.url).password);
      expect(await everything()).toEqual(before);
      expect(await places()).toEqual([]);
    });

    test("with --url alone too, or an empty one", async () => {
      const before = await everything();
      for (const more of [[], ["--empty"]]) {
        const outcome = await command([
          "race",
          "test/races/command/quota.ts",
          "--json",
          ...more,
          "--url",
          database.url,
        ]);
        expect(outcome.code, outcome.err).toBe(1);
        expect(told(outcome).database.how).toBe(more.length > 0 ? "empty" : "copy");
      }
      expect(await everything()).toEqual(before);
      expect(await places()).toEqual([]);
    });

    test("modules that read DATABASE_URL are in it too", async () => {
      const before = await everything();
      const outcome = await command(["race", "test/races/command/objects.ts", "--only", "likes"], {
        env: { DATABASE_URL: database.url },
      });
      expect(outcome.code, outcome.err).toBe(0);
      expect(outcome.out).toContain("liked in holdfast_race_");
      expect(outcome.out).not.toContain(`liked in ${database.name}`);
      expect(await everything()).toEqual(before);
    });

    test("a scenario about another database is not run, unless it says that it is its own", async () => {
      const before = await everything();
      const env = { DATABASE_URL: "", ELSEWHERE: database.url };
      const refused = await race(["--only", "elsewhere", "--json"], env);
      expect(refused.code).toBe(2);
      expect(told(refused).scenarios[0]?.error?.message).toMatch(
        new RegExp(`its \`db\` is in "${database.name}", and not in the database of this run`),
      );
      expect(await everything()).toEqual(before);
      expect((await race(["--only", "declared"], env)).code).toBe(0);
    });

    test("a connection to the original ends it", async () => {
      const run = start(["race", file, "--only", "endless"], {
        env: { DATABASE_URL: database.url, ELSEWHERE: database.url },
      });
      expect(refusal(await run.done)).toContain(`has opened a connection to "${database.name}" itself`);
      expect(await places()).toEqual([]);
    });
  });

  describe("what cannot be copied", () => {
    test("is in use: it says by whom and what to do, and the writer loses nothing", async () => {
      await using writer = new LiveWriter(database.url, "aside");
      await writer.more(30);
      const said = refusal(await race([]));
      expect(said).toMatch(
        new RegExp(
          `"${database.name}" is in use \\(session \\d+ of postgres \\(live writer\\)\\).*end that session first.*--empty.*PostgreSQL of its own`,
        ),
      );
      const empty = await command(["race", "test/races/command/quota.ts", "--empty"], {
        env: { DATABASE_URL: database.url },
      });
      expect(empty.code, empty.err).toBe(1);
      await writer.more(30);
      const written = await writer.end();
      const kept = await inside((client) => client.query("SELECT count(*)::int AS n FROM aside"));
      expect(kept.rows).toEqual([{ n: 800 + written }]);
      expect(await places()).toEqual([]);
    });

    test("or by a user who may not", async () => {
      const plain = refusal(await race([], { DATABASE_URL: await as("") }));
      expect(plain).toMatch(/may not create a database.*ALTER ROLE race_\w+ CREATEDB.*PostgreSQL of its own/);
      const creator = await as("CREATEDB");
      expect(refusal(await race([], { DATABASE_URL: creator }))).toMatch(
        /may not copy "\w+", which belongs to postgres.*--empty/,
      );
      const empty = await command(["race", "test/races/command/quota.ts", "--empty"], {
        env: { DATABASE_URL: creator },
      });
      expect(empty.code, empty.err).toBe(1);
      expect(await places()).toEqual([]);
    });
  });

  describe("what was made is removed", () => {
    test("after a scenario that fails, and leaves a connection open", async () => {
      const outcome = await race(["--only", "broken"]);
      expect(outcome.code).toBe(2);
      expect(outcome.out).toContain("could not run: no idea");
      expect(await places()).toEqual([]);
    });

    test("after Ctrl-C, in a terminal, and by a signal", async () => {
      const run = await underWay();
      expect(await places()).toHaveLength(1);
      run.child.kill("SIGINT");
      expect((await run.done).code).toBe(130);
      expect(await places()).toEqual([]);

      const screen = terminal(["race", file, "--only", "endless"], { env: { DATABASE_URL: database.url } });
      await screen.until("under way");
      screen.type("\x03");
      expect(await screen.ended).toBe(130);
      expect(await places()).toEqual([]);
    });

    test("by the next run, after one that was killed; one that is under way is left alone", async () => {
      const killed = await underWay();
      const [name = ""] = await places();
      killed.child.kill("SIGKILL");
      await killed.done;
      await eventually(async () => {
        const { rows } = await admin.query("SELECT 1 FROM pg_stat_activity WHERE datname = $1", [name]);
        expect(rows).toEqual([]);
      });
      // Nobody to be asked: it is named.
      const live = await underWay();
      expect(live.err()).toContain(`An earlier run was killed, and left ${name} on postgres://`);
      expect(live.err()).toContain(`DROP DATABASE ${name}`);
      const beside = (await places()).filter((each) => each !== name);
      expect(beside).toHaveLength(1);
      const empty = ["race", "test/races/command/quota.ts", "--empty"];
      const screen = terminal(empty, { env: { DATABASE_URL: database.url }, columns: 300 });
      const asked = await screen.until(/Remove it\? \(y\/N\)/);
      expect(asked).toContain(name);
      expect(asked).not.toContain(beside[0]);
      screen.type("n\r");
      expect(await screen.ended).toBe(1);
      expect(await places()).toEqual([name, ...beside].toSorted());
      const removed = await command([...empty, "--yes"], { env: { DATABASE_URL: database.url } });
      expect(removed.err).toContain(`Removed ${name}`);
      expect(await places()).toEqual(beside);
      live.child.kill("SIGTERM");
      expect((await live.done).code).toBe(130);
      expect(await places()).toEqual([]);
    });
  });

  describe("in place", () => {
    const here = () => ["--in-place", "--url", database.url];

    test("is not what a variable says, nor without a terminal and without --yes", async () => {
      const before = await everything();
      expect(refusal(await race(["--only", "fine", "--in-place", "--yes"]))).toContain("that --url names");
      const said = refusal(await race(["--only", "fine", ...here()]));
      expect(said).toContain(`in "${database.name}" itself`);
      expect(said).toContain("add --yes");
      expect(await everything()).toEqual(before);
      expect(await places()).toEqual([]);
    });

    test("is asked for in a terminal, and restores what the actors touched alone", async () => {
      const before = await everything();
      for (const [answer, code] of [
        ["n\r", 1],
        ["y\r", 0],
      ] as const) {
        const screen = terminal(["race", file, "--only", "fine", ...here()], { columns: 300 });
        const asked = await screen.until(/\(y\/N\)/);
        expect(asked).toContain(`Run ${file} in "${database.name}" itself, on postgres://`);
        expect(asked).not.toContain(new URL(database.url).password);
        screen.type(answer);
        expect(await screen.ended, await screen.all()).toBe(code);
        if (code === 1) expect(await everything()).toEqual(before);
      }
      const after = await everything();
      expect(after.aside).toEqual(before.aside);
      expect(after.sequence).toEqual(before.sequence);
      const values = ({ account }: typeof after) =>
        new Map((account as { id: number; balance: number }[]).map(({ id, balance }) => [id, balance]));
      expect(values(after)).toEqual(values(before));
      expect(await places()).toEqual([]);
    });

    test("with --yes, and told as such", async () => {
      const outcome = await race(["--only", "fine", "--yes", "--json", ...here()]);
      expect(outcome.code, outcome.err).toBe(0);
      expect(told(outcome).database).toMatchObject({ how: "in place", name: database.name });
    });

    test("is refused while anybody else is in there, on whatever table", async () => {
      await using writer = new LiveWriter(database.url, "aside");
      await writer.more(3);
      const said = refusal(await race(["--only", "fine", "--yes", ...here()]));
      expect(said).toMatch(/Others are in "\w+" \(session \d+ of postgres \(live writer\)\)/);
      await writer.more(3);
      const written = await writer.end();
      const kept = await inside((client) => client.query("SELECT count(*)::int AS n FROM aside"));
      expect(kept.rows).toEqual([{ n: 800 + written }]);
    });

    test("ends when somebody comes in the middle, who loses nothing", async () => {
      const run = await underWay(["--yes", ...here()]);
      await using writer = new LiveWriter(database.url, "aside");
      const said = await refusalOf(run);
      expect(said).toMatch(/[Oo]thers are (in|at work)/);
      await writer.more(3);
      const written = await writer.end();
      const kept = await inside((client) => client.query("SELECT count(*)::int AS n FROM aside"));
      expect(kept.rows).toEqual([{ n: 800 + written }]);
      await inside((client) => client.query("UPDATE account SET balance = 0 WHERE id = 2"));
    });

    test("is not known to be alone behind a pooler, and refused", async ({ skip }) => {
      const why = unavailable("pgbouncer");
      skip(why !== undefined, why);
      const pooled = await createDatabase("pgbouncer");
      try {
        const said = refusal(await race(["--only", "fine", "--yes", "--in-place", "--url", pooled.url]));
        expect(said).toMatch(/who else is in "\w+" cannot be seen from here/);
      } finally {
        await pooled.drop();
      }
    });

    test("is of the database that was named, and not of one of the same name", async ({ skip }) => {
      const why = unavailable("postgresOld");
      skip(why !== undefined, why);
      const old = new Client({ connectionString: serverUrl("postgresOld") });
      await old.connect();
      await old.query(`CREATE DATABASE ${database.name}`);
      try {
        const there = new URL(serverUrl("postgresOld"));
        there.pathname = `/${database.name}`;
        const outcome = await race(["--only", "elsewhere", "--yes", "--json", ...here()], {
          ELSEWHERE: there.href,
        });
        expect(outcome.code).toBe(2);
        expect(told(outcome).scenarios[0]?.error?.message).toContain("on another server");
      } finally {
        await old.query(`DROP DATABASE ${database.name} WITH (FORCE)`);
        await old.end();
      }
    });
  });

  async function refusalOf(run: Running): Promise<string> {
    const { code, out, err } = await run.done;
    expect(code, out + err).toBe(2);
    return out + err;
  }
});

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  const reason = unavailable(server);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  const scenarios = "test/races/command/account-mysql.ts";
  let database: TestDatabase;
  let admin: mysql.Connection;

  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase(server);
    admin = await mysql.createConnection(database.url);
    for (const text of [
      "CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, half int GENERATED ALWAYS AS (balance / 2) STORED)",
      "CREATE TABLE owner (id int AUTO_INCREMENT PRIMARY KEY, account int, FOREIGN KEY (account) REFERENCES account (id) ON DELETE CASCADE)",
      "CREATE TABLE journal (n int)",
      "CREATE FUNCTION doubled(n int) RETURNS int DETERMINISTIC RETURN n * 2",
      "CREATE TABLE aside (id int AUTO_INCREMENT PRIMARY KEY, n int)",
      // One that needs another, which comes after it in the alphabet.
      "CREATE VIEW wealthy AS SELECT id, balance FROM account WHERE balance >= 60",
      "CREATE VIEW rich AS SELECT * FROM wealthy",
      "CREATE TRIGGER noted AFTER UPDATE ON account FOR EACH ROW INSERT INTO journal VALUES (NEW.balance)",
      "INSERT INTO account (id, balance) VALUES (1, 100), (2, 0)",
      "INSERT INTO owner (account) VALUES (1), (2)",
      "INSERT INTO aside (n) VALUES (0), (0)",
    ])
      await admin.query(text);
  });

  afterAll(async () => {
    for (const name of (await places?.()) ?? []) await admin.query(`DROP DATABASE ${name}`);
    await admin?.end();
    await database?.drop();
  });

  const places = async (): Promise<string[]> =>
    admin
      ? ((await admin.query("SHOW DATABASES LIKE 'holdfast\\_race\\_%'"))[0] as object[]).map((row) =>
          String(Object.values(row)[0]),
        )
      : [];

  async function everything(): Promise<unknown> {
    const tables = ["account", "owner", "journal", "aside"];
    const [sums] = await admin.query(`CHECKSUM TABLE ${tables.join(", ")}`);
    const contents = await Promise.all(
      tables.map(async (name) => (await admin.query(`SELECT * FROM ${name} ORDER BY 1`))[0]),
    );
    return { sums, contents };
  }

  test("it runs in a copy, with what is in the original, which stays as it was", async () => {
    const before = await everything();
    await using writer = new LiveWriter(database.url, "aside");
    const outcome = await command(["race", scenarios, "--json"], { env: { DATABASE_URL: database.url } });
    const written = await writer.end();
    expect(outcome.code, outcome.out + outcome.err).toBe(0);
    expect(told(outcome).database).toMatchObject({ how: "copy" });
    expect(outcome.err).toContain(`a copy of "${database.name}"`);
    const [[row]] = (await admin.query("SELECT count(*) AS n FROM aside WHERE n > 0")) as unknown as [
      [{ n: number }],
    ];
    expect(row.n).toBe(written);
    await admin.query("DELETE FROM aside WHERE n > 0");
    expect(await everything()).toEqual(before);
    expect(await places()).toEqual([]);
  });

  test("in place only if nobody else is there, and it is said", async () => {
    const before = await everything();
    const args = ["race", scenarios, "--in-place", "--yes", "--url", database.url];
    expect(refusal(await command(args))).toMatch(/Others are in "\w+" \(session \d+ of /);
    expect(await everything()).toEqual(before);
    const here = admin;
    await here.changeUser({ database: "mysql" });
    try {
      const outcome = await command(args);
      expect(outcome.code, outcome.out + outcome.err).toBe(0);
    } finally {
      await here.changeUser({ database: database.name });
      await here.query("UPDATE account SET balance = 100 WHERE id = 1");
      await here.query("DELETE FROM journal");
    }
  });

  test("a user who may not create one; a routine that names its database", async () => {
    const name = `race_${randomBytes(6).toString("hex")}`;
    await admin.query(`CREATE USER ${name} IDENTIFIED BY '${password}'`);
    await admin.query(`GRANT ALL ON ${database.name}.* TO ${name}`);
    await admin.query(
      `CREATE FUNCTION astray() RETURNS int DETERMINISTIC RETURN (SELECT count(*) FROM ${database.name}.account)`,
    );
    try {
      const url = new URL(database.url);
      url.username = name;
      url.password = password;
      const said = refusal(await command(["race", scenarios], { env: { DATABASE_URL: url.href } }));
      expect(said).toMatch(/may not create a database.*GRANT ALL ON `holdfast\\_race\\_%`/);
      expect(refusal(await command(["race", scenarios, "--in-place", "--yes", "--url", url.href]))).toContain(
        "GRANT PROCESS",
      );
      const named = refusal(await command(["race", scenarios], { env: { DATABASE_URL: database.url } }));
      expect(named).toMatch(/astray names its database in its text.*--empty/);
      expect(await places()).toEqual([]);
    } finally {
      await admin.query("DROP FUNCTION astray");
      await admin.query(`DROP USER ${name}`);
    }
  });
});

test("SQLite is told where its races are found", async () => {
  const outcome = await command(["race", file], { env: { DATABASE_URL: "file:app.db" } });
  expect(refusal(outcome)).toMatch(/is SQLite.*inThread/);
});
