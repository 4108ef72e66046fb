/** Who holds, and who waits, at this moment. */
import { setTimeout as sleep } from "node:timers/promises";
import type { Row } from "../../server.ts";
import { age } from "../../terminal.ts";
import { plural } from "../../text.ts";
import { type Check, type Finding, findings, short } from "../check.ts";
import { type MysqlPatient, literal } from "./patient.ts";
import { type Session, sessions, waits } from "./sessions.ts";

type MysqlCheck = Check<MysqlPatient>;

const who = ({ id, user }: Session): string => `session ${id} of ${user}`;

const lasted = (seconds: number): string => age(seconds * 1000);

const kill = (id: string): string => `KILL ${id};`;

const longTransactions: MysqlCheck = {
  id: "long-transactions",
  title: "a transaction has been at work for more than a minute",
  async run(patient) {
    const found = (await sessions(patient)).flatMap((session) => {
      const seconds = session.transaction?.seconds ?? 0;
      return seconds > 60 && !session.idle ? [{ session, seconds }] : [];
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

/** One that keeps others waiting is found at once, else after ten seconds: a round trip of the application is shorter. */
const idleHolders: MysqlCheck = {
  id: "idle-holders",
  title: "a session is in a transaction and does nothing",
  async run(patient) {
    const idle = async () => {
      const all = await sessions(patient);
      const pairs = await waits(patient);
      return all.flatMap((session) => {
        const { id, seconds, transaction } = session;
        const waiting = pairs.filter(({ blocker }) => blocker === id).length;
        const long = seconds >= (waiting > 0 ? 1 : 10);
        return transaction && session.idle && long ? [{ session, transaction, waiting }] : [];
      });
    };
    const first = await idle();
    if (first.length === 0) return [];
    // After a long statement, a session seems idle on MySQL that is not.
    await sleep(1000);
    return (await idle())
      .filter(({ transaction }) => first.some((before) => before.transaction.id === transaction.id))
      .toSorted((a, b) => b.session.seconds - a.session.seconds)
      .map(({ session, transaction, waiting }): Finding => ({
        severity: waiting > 0 ? "error" : "warning",
        what: `${who(session)} is idle in a transaction for ${lasted(session.seconds)}, holds ${plural(transaction.locked, "row lock")}${waiting > 0 ? `; ${plural(waiting, "session waits", "sessions wait")} for it` : ""}`,
        why: "Whatever it locked stays locked while it does nothing: a forgotten COMMIT, a call over the network inside of a transaction, or a frozen process.",
        fix: kill(session.id),
      }));
  },
};

const waiting: MysqlCheck = {
  id: "waits",
  title: "a session has been waiting for a row or a table for more than a second",
  async run(patient) {
    const all = (await sessions(patient)).toSorted((a, b) => b.seconds - a.seconds);
    const pairs = await waits(patient);
    const why = "It holds a connection, and what it locked before, for as long as it waits.";
    return [
      ...findings(
        "warning",
        why,
        all.flatMap((session) => {
          const seconds = session.transaction?.waiting ?? 0;
          if (seconds < 1) return [];
          const blockers = pairs.filter(({ waiter }) => waiter === session.id).map(({ blocker }) => blocker);
          const most = blockers.slice(0, 5);
          return {
            what: `${who(session)} waits for a row since ${lasted(seconds)}, behind session ${most.join(", ")}: ${short(session.query, 50)}`,
            fix: most.map(kill).join("\n") || "holdfast locks",
          };
        }),
      ),
      ...findings(
        "warning",
        `${why} And everybody who comes to that table waits behind it.`,
        all
          .filter(({ state, seconds }) => /^Waiting for table.*lock$/.test(state) && seconds >= 1)
          .map((session) => ({
            what: `${who(session)} waits for a table since ${lasted(session.seconds)}: ${short(session.query, 50)}`,
            fix: kill(session.id),
          })),
      ),
    ];
  },
};

const namedLocks: MysqlCheck = {
  id: "named-locks",
  title: "a session has been waiting for GET_LOCK for more than a second",
  async run(patient) {
    const found = (await sessions(patient)).filter(
      ({ state, seconds }) => state === "User lock" && seconds >= 1,
    );
    return findings(
      "warning",
      "A cycle of a named lock and a row lock is seen by nobody: it lasts until one of the two has waited long enough.",
      found
        .toSorted((a, b) => b.seconds - a.seconds)
        .map((session) => ({
          what: `${who(session)} waits for a named lock since ${lasted(session.seconds)}: ${short(session.query)}`,
          fix: "holdfast locks   # who holds it",
        })),
    );
  },
};

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
  idleHolders,
  longTransactions,
  waiting,
  namedLocks,
  preparedTransactions,
];
