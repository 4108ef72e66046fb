/** Who holds, and who waits, at this moment. */
import { setTimeout as sleep } from "node:timers/promises";
import type { Row } from "../../server.ts";
import { age } from "../../terminal.ts";
import { plural } from "../../text.ts";
import { type Check, findings, short } from "../check.ts";
import { involved, waitsCheck } from "../waits.ts";
import { type MysqlPatient, literal } from "./patient.ts";
import { type Session, sessions } from "./sessions.ts";

type MysqlCheck = Check<MysqlPatient>;

const who = ({ id, user }: Session): string => `session ${id} of ${user}`;

const lasted = (seconds: number): string => age(seconds * 1000);

const sql = (id: string): string => `KILL ${id};`;

const kill = (id: string): string => `holdfast kill ${id}   # in SQL: ${sql(id)}`;

const longTransactions: MysqlCheck = {
  id: "long-transactions",
  title: "a transaction has been at work for more than a minute, in nobody's way",
  async run(patient) {
    const told = await involved(patient);
    const found = (await sessions(patient)).flatMap((session) => {
      const seconds = session.transaction?.seconds ?? 0;
      return seconds > 60 && !session.idle && !told.has(session.id) ? [{ session, seconds }] : [];
    });
    return findings(
      "warning",
      "Its locks are kept that long, and old versions of every row that changed since have to be kept for it: reads get slow.",
      found
        .toSorted((a, b) => b.seconds - a.seconds)
        .map(({ session, seconds }) => ({
          what: `${who(session)}: ${lasted(seconds)}, now ${short(session.query)}`,
          fix: kill(session.id),
        })),
    );
  },
};

/** Those in whose way somebody is are told by `waits`. A round trip of the application is shorter than this. */
const idleHolders: MysqlCheck = {
  id: "idle-holders",
  title: "a session has been in a transaction for ten seconds and does nothing, in nobody's way yet",
  async run(patient) {
    const told = await involved(patient);
    const idle = async () =>
      (await sessions(patient)).flatMap((session) => {
        const { id, seconds, transaction } = session;
        return transaction && session.idle && seconds >= 10 && !told.has(id)
          ? [{ session, transaction }]
          : [];
      });
    const first = await idle();
    if (first.length === 0) return [];
    // After a long statement, a session seems idle on MySQL that is not.
    await sleep(1000);
    return findings(
      "warning",
      "Whatever it locked stays locked while it does nothing: a forgotten COMMIT, a call over the network inside of a transaction, or a frozen process.",
      (await idle())
        .filter(({ transaction }) => first.some((before) => before.transaction.id === transaction.id))
        .toSorted((a, b) => b.session.seconds - a.session.seconds)
        .map(({ session, transaction }) => ({
          what: `${who(session)} is idle in a transaction for ${lasted(session.seconds)}, holds ${plural(transaction.locked, "row lock")}`,
          fix: kill(session.id),
        })),
    );
  },
};

/** MariaDB does not tell who has a table that is waited for, and MySQL nothing without performance_schema. */
const waits: MysqlCheck = waitsCheck({
  end: sql,
  tell: ({ maria }) =>
    maria
      ? "INSTALL SONAME 'metadata_lock_info';   -- a plugin that comes with the server: then holdfast locks tells who has the table"
      : "performance_schema = ON   # my.cnf, with a restart: then holdfast locks tells who has it",
  async suspects(patient, waitingMs) {
    return (await sessions(patient))
      .filter(({ transaction }) => {
        // Of whole seconds.
        const before = transaction !== undefined && transaction.seconds >= Math.floor(waitingMs / 1000);
        return before && transaction.waiting === undefined;
      })
      .toSorted((a, b) => (b.transaction?.seconds ?? 0) - (a.transaction?.seconds ?? 0))
      .map((session) => ({
        id: session.id,
        who: `${who(session)} (${session.idle ? "idle" : session.state}, ${lasted(session.transaction?.seconds ?? 0)} in its transaction)`,
      }));
  },
});

/** The server does not tell since when: one that is there twice was left. */
const preparedTransactions: MysqlCheck = {
  id: "prepared-transactions",
  title: "a two-phase commit (XA) that nobody finishes",
  async run(patient) {
    const recover = async (): Promise<Map<string, Row>> =>
      new Map(
        (await patient.look("XA RECOVER CONVERT XID".replace(patient.maria ? " CONVERT XID" : "", ""))).map(
          (row) => [JSON.stringify(row), row],
        ),
      );
    const first = await recover();
    if (first.size === 0) return [];
    await sleep(1000);
    const left = [...(await recover())].filter(([key]) => first.has(key)).map(([, row]) => row);
    return findings(
      "error",
      "It keeps its row locks without any session, also over a restart, and no limit of time ends it.",
      left.map((row) => {
        const xid = xidOf(row, patient.maria);
        return {
          what: `prepared transaction ${xid}`,
          fix: `XA ROLLBACK ${xid};   -- or XA COMMIT, as its coordinator decided`,
        };
      }),
    );
  },
};

/** Both parts lie in one column. MySQL gives it in hexadecimal if asked to. */
function xidOf(row: Row, maria: boolean): string {
  const [first, format] = [Number(row["gtrid_length"]), String(row["formatid"])];
  const data = String(row["data"]);
  if (maria) return [literal(data.slice(0, first)), literal(data.slice(first)), format].join(", ");
  const hex = data.replace(/^0x/i, "");
  const part = (from: number, to?: number): string => `X'${hex.slice(from, to)}'`;
  return [part(0, first * 2), part(first * 2), format].join(", ");
}

export const activityChecks: readonly MysqlCheck[] = [
  waits,
  idleHolders,
  longTransactions,
  preparedTransactions,
];
