import { describe, expect, test } from "vitest";
import type { DriverError, Failure } from "../../packages/holdfast/src/seam/database.ts";
import { UsageError, LockTimeoutError } from "../../packages/holdfast/src/seam/errors.ts";
import {
  classify,
  isRetryable,
  isUniqueViolation,
  remember,
} from "../../packages/holdfast/src/seam/failure.ts";
import { mysql } from "../../packages/holdfast/src/engines/mysql/index.ts";
import { postgres } from "../../packages/holdfast/src/engines/postgres/index.ts";
import { sqlite } from "../../packages/holdfast/src/engines/sqlite/index.ts";

type Table = Readonly<Record<string, Failure | undefined>>;

// From the manuals, by name; what is not to be mistaken for a failure of ours is listed with undefined.

/** https://www.postgresql.org/docs/current/errcodes-appendix.html */
const sqlStates: Table = {
  "40P01": "deadlock", // deadlock_detected
  "40001": "serialization", // serialization_failure
  "55P03": "lock-timeout", // lock_not_available
  "23505": "unique", // unique_violation
  "23503": "foreign-key", // foreign_key_violation
  "23514": "check", // check_violation
  "57014": "canceled", // query_canceled
  "25P04": "deadline", // transaction_timeout
  "25P03": "deadline", // idle_in_transaction_session_timeout
  "25P02": "aborted", // in_failed_sql_transaction
  "25P01": "not-in-transaction", // no_active_sql_transaction
  "25006": "read-only", // read_only_sql_transaction
  "3F000": "schema-missing", // invalid_schema_name
  "42P01": "schema-missing", // undefined_table
  "42883": "schema-missing", // undefined_function
  "57P01": "lost", // admin_shutdown
  "57P02": "lost", // crash_shutdown
  "57P05": "lost", // idle_session_timeout
  "57P03": "lost", // cannot_connect_now
  "08000": "lost", // connection_exception
  "08001": "lost", // sqlclient_unable_to_establish_sqlconnection
  "08003": "lost", // connection_does_not_exist
  "08006": "lost", // connection_failure
  "08P01": "lost", // protocol_violation
  "42601": undefined, // syntax_error
  "22P02": undefined, // invalid_text_representation
  "53300": "too-many-connections",
  "53100": "full", // disk_full
  "58030": "storage", // io_error
  XX001: "storage", // data_corrupted
  "42501": "denied", // insufficient_privilege
  "28P01": "denied", // invalid_password
  "40003": undefined, // statement_completion_unknown
  "0A000": undefined, // feature_not_supported
};

/** https://mariadb.com/kb/en/mariadb-error-code-reference/, https://dev.mysql.com/doc/mysql-errors/8.4/en/ */
const errorNumbers: Table = {
  1213: "deadlock", // ER_LOCK_DEADLOCK
  3058: "deadlock", // ER_USER_LOCK_DEADLOCK
  1205: "lock-timeout", // ER_LOCK_WAIT_TIMEOUT
  3572: "lock-timeout", // ER_LOCK_NOWAIT
  1020: "serialization", // ER_CHECKREAD
  1062: "unique", // ER_DUP_ENTRY
  1451: "foreign-key", // ER_ROW_IS_REFERENCED_2
  1452: "foreign-key", // ER_NO_REFERENCED_ROW_2
  3819: "check", // ER_CHECK_CONSTRAINT_VIOLATED
  4025: "check", // ER_CONSTRAINT_FAILED
  1317: "canceled", // ER_QUERY_INTERRUPTED
  1290: "read-only", // ER_OPTION_PREVENTS_STATEMENT
  1792: "read-only", // ER_CANT_EXECUTE_IN_READ_ONLY_TRANSACTION
  1146: "schema-missing", // ER_NO_SUCH_TABLE
  1927: "lost", // ER_CONNECTION_KILLED
  1053: "lost", // ER_SERVER_SHUTDOWN
  2006: "lost", // CR_SERVER_GONE_ERROR
  2013: "lost", // CR_SERVER_LOST
  1064: undefined, // ER_PARSE_ERROR
  1045: "denied", // ER_ACCESS_DENIED_ERROR
  1040: "too-many-connections", // ER_CON_COUNT_ERROR
  1114: "full", // ER_RECORD_FILE_FULL
  1021: "full", // ER_DISK_FULL
  1026: "storage", // ER_ERROR_ON_WRITE
  1406: undefined, // ER_DATA_TOO_LONG
  0: undefined,
};
const errorNames: Table = {
  PROTOCOL_CONNECTION_LOST: "lost",
  ER_CONNECTION_KILLED: "lost",
  ER_SERVER_SHUTDOWN: "lost",
  ER_PARSE_ERROR: undefined,
};

/** https://www.sqlite.org/rescode.html */
const resultCodes: Table = {
  SQLITE_BUSY: "lock-timeout",
  SQLITE_BUSY_RECOVERY: "lock-timeout",
  SQLITE_BUSY_TIMEOUT: "lock-timeout",
  SQLITE_LOCKED: "lock-timeout",
  SQLITE_BUSY_SNAPSHOT: "serialization",
  SQLITE_CONSTRAINT_UNIQUE: "unique",
  SQLITE_CONSTRAINT_PRIMARYKEY: "unique",
  SQLITE_CONSTRAINT_ROWID: "unique",
  SQLITE_CONSTRAINT_FOREIGNKEY: "foreign-key",
  SQLITE_CONSTRAINT_CHECK: "check",
  SQLITE_READONLY: "read-only",
  SQLITE_INTERRUPT: "canceled",
  SQLITE_CONSTRAINT_NOTNULL: undefined,
  SQLITE_CORRUPT: "storage",
  SQLITE_CORRUPT_INDEX: "storage",
  SQLITE_IOERR: "storage",
  SQLITE_IOERR_WRITE: "storage",
  SQLITE_NOTADB: "storage",
  SQLITE_FULL: "full",
  SQLITE_ERROR: undefined,
};

interface Engine {
  classify(error: DriverError): Failure | undefined;
}

describe.each<[string, Engine, Table, (code: string) => object]>([
  ["SQLSTATEs", postgres, sqlStates, (code) => ({ code })],
  ["error numbers", mysql, errorNumbers, (code) => ({ errno: Number(code), code: "ER_WHATEVER" })],
  ["error names", mysql, errorNames, (code) => ({ code })],
  ["result codes", sqlite, resultCodes, (code) => ({ code })],
])("%s", (_, engine, table, make) => {
  test.each(Object.entries(table))("%s is %s", (code, failure) => {
    expect(engine.classify(make(code))).toBe(failure);
  });

  test("nothing else is a failure: not what every object has, nor codes of other kinds", () => {
    for (const code of [
      "",
      "constructor",
      "toString",
      "__proto__",
      "hasOwnProperty",
      40001,
      undefined,
      null,
      {},
    ])
      expect(engine.classify({ code } as DriverError)).toBeUndefined();
    expect(engine.classify({})).toBeUndefined();
  });
});

describe("classify", () => {
  const source = { engine: postgres };
  const unique = Object.assign(new Error("duplicate key"), { code: "23505" });

  test("looks through causes, and stops where they go in circles", () => {
    expect(classify(source, unique)).toBe("unique");
    expect(classify(source, new Error("a", { cause: new Error("b", { cause: unique }) }))).toBe("unique");
    const one: { cause?: unknown } = {};
    one.cause = { cause: one };
    expect(classify(source, one)).toBeUndefined();
  });

  test("the outermost that is known counts", () => {
    const outer = Object.assign(new Error("a", { cause: unique }), { code: "40001" });
    expect(classify(source, outer)).toBe("serialization");
  });

  test.each([undefined, null, "23505", 23505, true, Symbol("23505"), () => {}])(
    "%o is no failure",
    (error) => {
      expect(classify(source, error)).toBeUndefined();
    },
  );

  test.each(["ECONNRESET", "EPIPE", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN", "ETIMEDOUT", "EHOSTUNREACH"])(
    "a socket's %s is a lost connection on every engine",
    (code) => {
      for (const engine of [postgres, mysql, sqlite]) expect(classify({ engine }, { code })).toBe("lost");
    },
  );

  test("a file that is not there is no lost connection", () => {
    for (const code of ["ENOENT", "EACCES"]) expect(classify(source, { code })).toBeUndefined();
  });

  test("the client's own word goes before the error's", () => {
    const unwrap = (error: unknown) => (error as { inner?: DriverError }).inner;
    expect(classify({ engine: postgres, unwrap }, { code: "23505", inner: { code: "40P01" } })).toBe(
      "deadlock",
    );
    expect(classify({ engine: postgres, unwrap }, { code: "23505", inner: { lost: true } })).toBe("lost");
    expect(classify({ engine: postgres, unwrap }, { code: "23505", inner: { code: "?" } })).toBe("unique");
    expect(
      classify({ engine: postgres, unwrap }, new Error("a", { cause: { inner: { code: "23514" } } })),
    ).toBe("check");
  });
});

describe("questions without an instance", () => {
  test("are answered for the clients in use, and only for them", () => {
    const busy = { code: "SQLITE_CONSTRAINT_UNIQUE" };
    remember({ engine: postgres });
    expect(isUniqueViolation({ code: "23505" })).toBe(true);
    expect(isUniqueViolation(busy)).toBe(false);
    remember({ engine: sqlite });
    remember({ engine: mysql });
    expect(isUniqueViolation(busy)).toBe(true);
    expect(isUniqueViolation(new Error("own", { cause: { errno: 1062 } }))).toBe(true);
    for (const error of [undefined, null, "23505", { code: "23503" }, new Error("x")])
      expect(isUniqueViolation(error)).toBe(false);
  });

  test("worth another run", () => {
    for (const code of ["40P01", "40001", "55P03", "57P01", "ECONNRESET", "SQLITE_BUSY_SNAPSHOT"])
      expect(isRetryable({ code })).toBe(true);
    for (const code of ["23505", "23514", "57014", "25P04", "25P02", "42601", "ENOENT"])
      expect(isRetryable({ code })).toBe(false);
    const timeout = new LockTimeoutError({ keys: ["a"], holders: [], waitedMs: 1 });
    expect(isRetryable(timeout)).toBe(true);
    expect(isRetryable(new UsageError("a", "HF_USAGE", { code: "40001" }))).toBe(false);
  });
});
