/** A server, or a pooler before it, that has no connection left: what to do about it. */
import { NoAnswer } from "./within.ts";

/** The ones that tell who is in the way. */
const looks = "holdfast locks and holdfast doctor do with one connection.";

const past =
  "A pooler without a free server connection, or a frozen server, does not answer. Connect past the pooler, to the server's own port: holdfast locks shows there who keeps its connections. To have more: default_pool_size or reserve_pool_size of PgBouncer.";

/** By the words of the server, where one code means several limits. The first that fits counts. */
const postgresLimits: readonly (readonly [RegExp, string])[] = [
  [/for role "/, "Raise it: ALTER ROLE … CONNECTION LIMIT …; or connect as another role."],
  [/for database "/, "Raise it: ALTER DATABASE … CONNECTION LIMIT …; or connect as a superuser."],
  [
    /pg_use_reserved_connections/,
    `The server keeps the last ones for members of pg_use_reserved_connections (reserved_connections) and for superusers (superuser_reserved_connections): connect as one of them. ${looks} To have more: max_connections, with a restart, or smaller pools.`,
  ],
  [
    /reserved/,
    `The server keeps the last ones for superusers (superuser_reserved_connections): connect as one. ${looks} To have more: max_connections, with a restart, or smaller pools.`,
  ],
  [
    /./,
    "All are in use, also those that the server keeps for superusers (superuser_reserved_connections) and for members of pg_use_reserved_connections (reserved_connections): stop an instance of the application, and look at once. To have more: max_connections, with a restart, or smaller pools.",
  ],
];

const mysqlLimits: Readonly<Record<number, string>> = {
  // ER_CON_COUNT_ERROR
  1040: `The server keeps one more for users with CONNECTION_ADMIN (MariaDB: CONNECTION ADMIN), and a port of its own if admin_address (MariaDB: extra_port) is set: connect that way. ${looks} To have more: SET GLOBAL max_connections = …; or smaller pools.`,
  // ER_TOO_MANY_USER_CONNECTIONS
  1203: "Raise it: SET GLOBAL max_user_connections = …; or connect as another user.",
  // ER_USER_LIMIT_REACHED
  1226: "Raise it: ALTER USER … WITH MAX_USER_CONNECTIONS …; or connect as another user.",
};

/** Undefined: it is another kind of error. */
export function remedyOfNoConnection(error: unknown): string | undefined {
  if (error instanceof NoAnswer) return past;
  const { code, errno, message } = (error ?? {}) as { code?: unknown; errno?: unknown; message?: unknown };
  const said = String(message);
  // PgBouncer has one code for all that it says.
  if (code === "08P01" && /query_wait_timeout/.test(said)) return past;
  if (code === "08P01" && /max_client_conn/.test(said))
    return "The pooler takes no more clients: raise max_client_conn of PgBouncer, or connect past it, to the server's own port.";
  if (code === "53300" || (code === "08P01" && /too many c|slots are reserved/.test(said)))
    return postgresLimits.find(([words]) => words.test(said))?.[1];
  // Also of queries in an hour, for which nobody is short of connections.
  if (errno === 1226 && !/max_user_connections/.test(said)) return undefined;
  return mysqlLimits[Number(errno)];
}
