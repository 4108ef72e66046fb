/** What tests that hold statements back read of the protocol: traffic of real clients, cut in every way. */
import { type Socket, connect } from "node:net";
import { Readable } from "node:stream";
import { deflateSync } from "node:zlib";
import { fromMysql2 } from "holdfast/mysql2";
import { createConnection as createMariadbConnection } from "mariadb";
import { type Connection, createConnection, createPool } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import type { SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import { withConnection } from "../../packages/holdfast/src/transaction/one-shot.ts";
import { keep } from "../../packages/holdfast/src/engines/mysql/keep.ts";
import { MysqlReader, protocol } from "../../packages/holdfast/src/engines/mysql/protocol.ts";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";
import { eventually } from "../harness/wait.ts";

interface Piece {
  readonly from: "client" | "server";
  readonly data: Buffer;
}

/** A connection to the server, with what goes over it. */
function tapped(url: string): { socket: Socket; traffic: Piece[] } {
  const { hostname, port } = new URL(url);
  const socket = connect(Number(port), hostname);
  const traffic: Piece[] = [];
  const write = socket.write.bind(socket) as (...args: unknown[]) => boolean;
  (socket as { write: unknown }).write = (data: Buffer, ...rest: unknown[]) => {
    traffic.push({ from: "client", data: Buffer.from(data) });
    return write(data, ...rest);
  };
  socket.on("data", (data: Buffer) => traffic.push({ from: "server", data: Buffer.from(data) }));
  return { socket, traffic };
}

interface Transcript {
  readonly statements: string[];
  readonly rows: string[][];
  readonly errors: string[];
  /** Of each statement: whether nothing was left to be answered when the next one began. */
  readonly answered: boolean[];
}

function transcriptOf(traffic: readonly Piece[], size = Infinity): Transcript {
  const reader = new MysqlReader();
  const statements: string[] = [];
  const rows: string[][] = [];
  const errors: string[] = [];
  const answered: boolean[] = [];
  let ready = true;
  for (const { from, data } of traffic)
    for (let at = 0; at < data.length; at += Math.min(size, data.length)) {
      const piece = data.subarray(at, at + Math.min(size, data.length));
      if (from === "client") {
        const text = reader.sent(piece);
        if (!text) continue;
        statements.push(text);
        answered.push(ready);
        ready = false;
      } else {
        const answer = reader.received(piece);
        rows.push(...answer.rows.map((row) => [...row]));
        if (answer.error !== undefined) errors.push(answer.error);
        ready ||= answer.ready;
      }
    }
  return { statements, rows, errors, answered };
}

/** From the first command on, as if the login had not been heard. */
function withoutLogin(traffic: readonly Piece[]): Piece[] {
  return traffic.slice(traffic.findIndex(({ from, data }) => from === "client" && data[3] === 0));
}

const packet = (sequence: number, body: Buffer): Buffer => {
  const header = Buffer.alloc(4);
  header.writeUIntLE(body.length, 0, 3);
  header[3] = sequence;
  return Buffer.concat([header, body]);
};

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let admin: Connection;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    admin = await createConnection(database.url);
    await admin.query(
      `CREATE TABLE thing (id bigint PRIMARY KEY, small tinyint, f double, d decimal(10, 2), t text, b varbinary(20),
        at datetime(3), day date, time time(3), j json)`,
    );
    await admin.query("CREATE TABLE parent (id int PRIMARY KEY)");
    await admin.query(
      "CREATE TABLE Child (id int PRIMARY KEY, p int, FOREIGN KEY (p) REFERENCES parent (id))",
    );
    await admin.query(
      "CREATE TABLE logged (id int AUTO_INCREMENT PRIMARY KEY, n int, doubled int AS (n * 2) STORED)",
    );
    await admin.query("CREATE VIEW seen AS SELECT id FROM parent");
    await admin.query("CREATE PROCEDURE several() BEGIN SELECT 1 AS a; SELECT 2 AS a, 3 AS b; END");
  });

  beforeEach(({ skip }) => skip(why !== undefined, why));

  afterAll(async () => {
    await admin?.end();
    await database?.drop();
  });

  /** The same, however it is cut, and whether or not the login is heard. */
  const same = (traffic: readonly Piece[], expected: Transcript) => {
    expect(transcriptOf(traffic)).toEqual(expected);
    expect(transcriptOf(withoutLogin(traffic))).toEqual(expected);
    for (const size of [1, 2, 3, 5, 7, 64]) {
      expect(transcriptOf(traffic, size)).toEqual(expected);
      expect(transcriptOf(withoutLogin(traffic), size)).toEqual(expected);
    }
  };

  const all = (count: number) => Array.from({ length: count }, () => true);

  test("mysql2: texts, results and errors", async () => {
    const { socket, traffic } = tapped(database.url);
    const connection = await createConnection({
      uri: database.url,
      stream: socket,
      multipleStatements: true,
    });
    await connection.query("SELECT 1 AS a, NULL AS b, 'it''s' AS c");
    await connection.query("SELECT id FROM thing WHERE id < 0");
    await connection.ping();
    await connection.query("SELECT 1; DO 0; SELECT 2, 3");
    await connection.query("CALL several()");
    await expect(connection.query("SELECT nope")).rejects.toThrow();
    await connection.changeUser({});
    await connection.query("SELECT 4");
    await connection.end();
    same(traffic, {
      statements: [
        "SELECT 1 AS a, NULL AS b, 'it''s' AS c",
        "SELECT id FROM thing WHERE id < 0",
        "SELECT 1; DO 0; SELECT 2, 3",
        "CALL several()",
        "SELECT nope",
        "SELECT 4",
      ],
      rows: [["1", "NULL", "it's"], ["1"], ["2", "3"], ["1"], ["2", "3"], ["4"]],
      errors: [expect.stringMatching(/^Unknown column 'nope'/)],
      answered: all(6),
    });
  });

  test("mysql2: prepared statements", async () => {
    const { socket, traffic } = tapped(database.url);
    const connection = await createConnection({ uri: database.url, stream: socket, timezone: "Z" });
    const insert =
      "INSERT INTO thing VALUES (?, ?, ?, ?, 'not ? a value', ?, ?, '2026-02-03', '-25:00:00.5', ?) -- ?";
    await connection.execute(insert, [
      "9007199254740993",
      true,
      0.5,
      null,
      Buffer.from([0, 255]),
      new Date("2026-01-02T03:04:05.678Z"),
      '{"a": "it\'s"}',
    ]);
    for (let i = 0; i < 2; i++) await connection.execute("SELECT * FROM thing WHERE id > ?", [i]);
    await expect(connection.execute("SELECT nope FROM thing WHERE id = ?", [1])).rejects.toThrow();
    await expect(
      connection.execute("INSERT INTO thing (id) VALUES (?)", ["9007199254740993"]),
    ).rejects.toThrow();
    await connection.execute("DELETE FROM thing");
    await connection.end();
    const row = [
      "9007199254740993",
      "1",
      "0.5",
      "NULL",
      "not ? a value",
      "0x00ff",
      "2026-01-02 03:04:05.678000",
      "2026-02-03",
      "-25:00:00.500000",
      `{"a": "it's"}`,
    ];
    same(traffic, {
      statements: [
        `INSERT INTO thing VALUES ('9007199254740993', 1, 0.5, NULL, 'not ? a value', 0x00ff, '2026-01-02 03:04:05.678000', '2026-02-03', '-25:00:00.5', '{"a": "it''s"}') -- ?`,
        "SELECT * FROM thing WHERE id > 0",
        "SELECT * FROM thing WHERE id > 1",
        "INSERT INTO thing (id) VALUES ('9007199254740993')",
        "DELETE FROM thing",
      ],
      rows: [row, row],
      errors: [expect.stringMatching(/nope/), expect.stringMatching(/^Duplicate entry/)],
      answered: all(5),
    });
  });

  test("mariadb: prepared statements, and batches", async () => {
    const { socket, traffic } = tapped(database.url);
    const { hostname, port, username, password, pathname } = new URL(database.url);
    const connection = await createMariadbConnection({
      host: hostname,
      port: Number(port),
      user: username,
      password: decodeURIComponent(password),
      database: pathname.slice(1),
      allowPublicKeyRetrieval: true,
      stream: (done) => done(undefined, socket),
    });
    const from = traffic.length;
    await connection.batch("INSERT INTO parent VALUES (?)", [[1], [2], [3]]);
    // The second time it is not told of the columns again.
    for (let i = 1; i < 3; i++)
      await connection.execute("SELECT id FROM parent WHERE id > ? ORDER BY id", [i]);
    await connection.execute("INSERT INTO parent VALUES (?)", [4n]);
    await connection.query("SELECT ? AS a", ["x"]);
    await connection.query("DELETE FROM parent");
    await connection.end();
    const { statements, rows, errors } = transcriptOf(traffic);
    expect(statements.slice(-5)).toEqual([
      "SELECT id FROM parent WHERE id > 1 ORDER BY id",
      "SELECT id FROM parent WHERE id > 2 ORDER BY id",
      "INSERT INTO parent VALUES (4)",
      "SELECT 'x' AS a",
      "DELETE FROM parent",
    ]);
    expect(rows.slice(-4)).toEqual([["2"], ["3"], ["3"], ["x"]]);
    expect(errors).toEqual([]);
    const expected = transcriptOf(traffic.slice(from));
    same(traffic.slice(from), expected);
  });

  const file = async () => {
    const { socket, traffic } = tapped(database.url);
    const connection = await createConnection({ uri: database.url, stream: socket });
    await connection.query({
      sql: "LOAD DATA LOCAL INFILE 'ids' INTO TABLE parent",
      infileStreamFactory: () => Readable.from(Array.from({ length: 300 }, (_, i) => Buffer.from(`${i}\n`))),
    } as never);
    await connection.query("DELETE FROM parent");
    await connection.end();
    same(traffic, {
      statements: ["LOAD DATA LOCAL INFILE 'ids' INTO TABLE parent", "DELETE FROM parent"],
      rows: [],
      errors: [],
      answered: all(2),
    });
  };
  // The other one refuses files by default.
  test.for(server === "mariadb" ? ["a file that the client sends"] : [])("%s", file);

  const onServer = async <T>(work: (connection: SqlConnection) => Promise<T>): Promise<T> => {
    const pool = createPool({ uri: database.url, connectionLimit: 2 });
    try {
      return await withConnection({ database: fromMysql2(pool) }, work as never);
    } finally {
      await pool.end();
    }
  };

  test("tables that are related", async () => {
    await admin.query(
      "CREATE TRIGGER logs AFTER INSERT ON parent FOR EACH ROW INSERT INTO logged (n) VALUES (1)",
    );
    const groups = await onServer((connection) => protocol.related(connection));
    await expect(onServer((connection) => keep(connection))).rejects.toThrow("parent has triggers");
    await admin.query("DROP TRIGGER logs");
    expect(groups.toSorted((a, b) => a.join().localeCompare(b.join()))).toEqual([
      ["child", "parent"],
      ["parent", "*"],
      ["seen", "*"],
    ]);
  });

  test("rows are kept, and brought back", async () => {
    await admin.query("INSERT INTO parent VALUES (0), (1)");
    await admin.query("INSERT INTO Child VALUES (1, 1)");
    await admin.query("INSERT INTO logged (n) VALUES (4)");
    const state = async () => [
      (await admin.query("SELECT * FROM parent ORDER BY id"))[0],
      (await admin.query("SELECT * FROM Child"))[0],
      (await admin.query("SELECT n, doubled FROM logged"))[0],
    ];
    const before = await state();
    const anything = { anything: true, tables: new Set(""), calls: new Set(""), sequences: new Set("") };
    const ports = async () => {
      const [rows] = await admin.query(
        "SELECT host FROM information_schema.processlist WHERE db = DATABASE()",
      );
      return new Set((rows as { host: string }[]).map(({ host }) => Number(host.split(":")[1])));
    };
    await onServer(async (connection) => {
      const kept = await keep(connection);
      for (let i = 0; i < 2; i++) {
        await admin.query("DELETE FROM Child");
        await admin.query("UPDATE parent SET id = id + 5");
        await admin.query("INSERT INTO logged (n) VALUES (5)");
        await kept.restore(anything, { ports: await ports() });
        expect(await state()).toEqual(before);
      }
      await kept.forget();
    });
    for (const table of ["Child", "parent", "logged"]) await admin.query(`DELETE FROM ${table}`);
  });

  test("waits: for a row that was written, for GET_LOCK, for a definition", async () => {
    const clients = [tapped(database.url), tapped(database.url), tapped(database.url)];
    const [a, b, c] = (await Promise.all(
      clients.map(({ socket }) => createConnection({ uri: database.url, stream: socket })),
    )) as [Connection, Connection, Connection];
    const idOf = async (client: Connection) => {
      const [rows] = await client.query(protocol.who);
      return String(Object.values((rows as object[])[0] ?? {})[0]);
    };
    const [idA, idB] = [await idOf(a), await idOf(b)];
    await onServer(async (connection) => {
      const seen = () => protocol.waiting(connection, [idA, idB]);
      const waits = async (waiting: Promise<unknown>, end: () => Promise<unknown>) => {
        await eventually(async () => (await seen()).get(idB)?.includes(idA) === true);
        expect([...(await seen()).keys()]).toEqual([idB]);
        await end();
        await waiting;
        expect(await seen()).toEqual(new Map());
      };
      await a.query("START TRANSACTION");
      // Whoever waits for it makes a lock of it.
      await a.query("INSERT INTO parent VALUES (1)");
      await c.query("SELECT * FROM thing");
      await waits(b.query("SELECT * FROM parent WHERE id = 1 FOR UPDATE"), () => a.query("COMMIT"));
      await a.query("DO GET_LOCK('mine', 1)");
      await waits(b.query("DO GET_LOCK('mine', 10)"), () => a.query("DO RELEASE_ALL_LOCKS()"));
      await a.query("START TRANSACTION");
      await a.query("SELECT * FROM thing");
      await waits(b.query("ALTER TABLE thing ADD COLUMN later int"), () => a.query("COMMIT"));
    });
    await admin.query("DELETE FROM parent");
    await Promise.all([a.end(), b.end(), c.end()]);
  });

  test("a level, and back to the server's", async () => {
    const connection = await createConnection(database.url);
    const level = async () => {
      const [rows] = await connection.query(
        `SHOW VARIABLES WHERE Variable_name IN ('transaction_isolation', 'tx_isolation')`,
      );
      return [...new Set((rows as { Value: string }[]).map(({ Value }) => Value))];
    };
    const [usual] = await level();
    await connection.query(protocol.isolation("serializable"));
    expect(await level()).toEqual(["SERIALIZABLE"]);
    await connection.query(protocol.isolation(undefined));
    expect(await level()).toEqual([usual]);
    await connection.end();
  });
});

describe("without a server", () => {
  const query = (text: string) => Buffer.from(`\x03${text}`);
  const ok = packet(1, Buffer.from([0, 0, 0, 2, 0, 0, 0]));

  test("a statement of more than 16 MB comes in pieces", () => {
    const reader = new MysqlReader();
    const body = query(`SELECT '${"x".repeat(2 ** 24)}'`);
    const pieces = [packet(0, body.subarray(0, 0xffffff)), packet(1, body.subarray(0xffffff))];
    const cut = pieces.flatMap((piece) => [piece.subarray(0, 4), piece.subarray(4)]);
    const texts = cut.map((piece) => reader.sent(piece));
    expect(texts.slice(0, 3)).toEqual(["", undefined, undefined]);
    expect(texts[3]).toHaveLength(body.length - 1);
    expect(reader.received(packet(2, ok.subarray(4)))).toMatchObject({ ready: true });
  });

  test("a row of more than 16 MB is not taken for the end", () => {
    const reader = new MysqlReader();
    reader.sent(packet(0, query("SELECT big")));
    const length = Buffer.alloc(9);
    length[0] = 0xfe;
    length.writeBigUInt64LE(BigInt(2 ** 24), 1);
    const row = Buffer.concat([length, Buffer.alloc(2 ** 24, "y")]);
    const column = Buffer.concat([Buffer.from("\x03def\0\0\0\x01b\0\x0c"), Buffer.alloc(12)]);
    const end = Buffer.from([0xfe, 0, 0, 2, 0, 0, 0]);
    const answer = [packet(1, Buffer.from([1])), packet(2, column), packet(3, row.subarray(0, 0xffffff))];
    for (const each of answer)
      expect(reader.received(each)).toEqual({ ready: false, rows: [], error: undefined });
    const { rows, ready } = reader.received(packet(4, row.subarray(0xffffff)));
    expect([rows.length, rows[0]?.[0]?.length, ready]).toEqual([1, 2 ** 24, false]);
    expect(reader.received(packet(5, end))).toMatchObject({ ready: true, rows: [] });
  });

  test("two in one piece are answered when both are", () => {
    const reader = new MysqlReader();
    expect(reader.sent(Buffer.concat([packet(0, query("A")), packet(0, query("B"))]))).toBe("A; B");
    expect(reader.received(ok).ready).toBe(false);
    expect(reader.received(ok).ready).toBe(true);
  });

  test("what is prepared, closed or pinged is no statement", () => {
    const reader = new MysqlReader();
    for (const body of ["\x16SELECT ?", "\x19\x01\0\0\0", "\x0e", "\x18\x01\0\0\0\0\0long"])
      expect(reader.sent(packet(0, Buffer.from(body)))).toBeUndefined();
    // Prepared: one parameter and, as it may or may not come, an EOF.
    const prepared = packet(1, Buffer.from([0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]));
    const definition = packet(2, Buffer.concat([Buffer.from("\x03def\0\0\0\x01?\0\x0c"), Buffer.alloc(12)]));
    const eof = packet(3, Buffer.from([0xfe, 0, 0, 2, 0]));
    expect(reader.received(Buffer.concat([prepared, definition, eof])).ready).toBe(false);
    expect(reader.received(ok).ready).toBe(true);
  });

  test("one that was prepared before is known by its number, until it is learned", () => {
    const reader = new MysqlReader();
    const types = [1, 0x03, 0];
    const execute = [0x17, 7, 0, 0, 0, 0, 1, 0, 0, 0, 0, ...types, 42, 0, 0, 0];
    expect(reader.sent(packet(0, Buffer.from(execute)))).toBe("EXECUTE #7");
    expect(reader.unknown).toContain("statement_id = 7");
    reader.learn([["SELECT ?"]]);
    expect([reader.unknown, reader.text()]).toEqual([undefined, "SELECT 42"]);
  });

  test("a statement of ours is what the connection takes", () => {
    const [plain, other] = [new MysqlReader(), new MysqlReader()];
    plain.sent(packet(0, query("UPDATE t")));
    // With the number of its attributes, none, and of their sets.
    expect(other.sent(packet(0, query("\0\x01UPDATE t")))).toBe("UPDATE t");
    expect(plain.statement("SET x = 1")).toEqual(packet(0, query("SET x = 1")));
    expect(other.statement("SET x = 1")).toEqual(packet(0, query("\0\x01SET x = 1")));
  });

  test("a compressed connection is refused", () => {
    const inner = packet(0, query("SELECT 1"));
    const plain = Buffer.concat([packet(0, inner).subarray(0, 4), Buffer.alloc(3), inner]);
    expect(() => new MysqlReader().sent(plain)).toThrow("compressed");
    const zlib = deflateSync(packet(0, query("SELECT 1".padEnd(100))));
    const compressed = Buffer.concat([packet(0, zlib).subarray(0, 4), Buffer.from([105, 0, 0]), zlib]);
    expect(() => new MysqlReader().sent(compressed)).toThrow("compressed");
  });
});
