/** Limits of time that end what Holdfast does before it is done. */
import type { Check, Finding } from "../check.ts";
import type { MysqlPatient } from "./patient.ts";
import { set } from "./settings.ts";

/** Calls wait for locks for 5 s unless told otherwise. */
const leastSeconds = 5;

interface Limit {
  readonly setting: string;
  readonly perSecond: number;
  readonly recommended: number;
  readonly why: string;
}

const ofStatements = (setting: string, perSecond: number): Limit => ({
  setting,
  perSecond,
  recommended: 30,
  why: "A wait for a lock is a statement: it is ended before Holdfast's own limit (5 s, unless told otherwise), with another error, and is taken for a slow query. (hf.migrate raises it for itself.)",
});

const statementOfMysql = ofStatements("max_execution_time", 1000);
const statementOfMariadb = ofStatements("max_statement_time", 1);

/** Those that a server does not have are not among its settings. */
const pauses: readonly Limit[] = [
  "idle_transaction_timeout",
  "idle_write_transaction_timeout",
  "idle_readonly_transaction_timeout",
  "wait_timeout",
].map((setting) => ({
  setting,
  perSecond: 1,
  recommended: setting === "wait_timeout" ? 600 : 30,
  why: "A pause of the application between two statements, as a call of another service makes, ends the session in the middle of a transaction.",
}));

export const shortTimeouts: Check<MysqlPatient> = {
  id: "short-timeouts",
  title: `a statement may not take ${leastSeconds} s (max_execution_time; MariaDB: max_statement_time), or a transaction not pause for so long`,
  async run(patient): Promise<readonly Finding[]> {
    const settings = await patient.settings();
    const limits = [patient.maria ? statementOfMariadb : statementOfMysql, ...pauses];
    return limits.flatMap(({ setting, perSecond, recommended, why }): Finding[] => {
      const seconds = Number(settings.get(setting) ?? 0) / perSecond;
      if (!(seconds > 0 && seconds < leastSeconds)) return [];
      return [
        {
          severity: "warning",
          what: `${setting} is ${seconds} s`,
          why,
          fix: set(patient, setting, String(recommended * perSecond)),
        },
      ];
    });
  },
};
