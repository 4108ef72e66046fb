/** One table of checks for each kind of server. */
import type { Kind, Server } from "../server.ts";
import type { Check } from "./check.ts";
import { type Examined, type Watch, examine } from "./examine.ts";
import { mariadbChecks, mysqlChecks } from "./mysql/index.ts";
import { mysqlPatient } from "./mysql/patient.ts";
import type { Patient } from "./patient.ts";
import { postgresChecks } from "./postgres/index.ts";
import { postgresPatient } from "./postgres/patient.ts";
import { sqliteChecks } from "./sqlite/index.ts";
import { sqlitePatient } from "./sqlite/patient.ts";

export interface Examination {
  /** "PostgreSQL 18.4". */
  readonly title: string;
  readonly version: string;
  readonly examined: readonly Examined[];
}

export interface Practice {
  readonly name: string;
  readonly checks: readonly { readonly id: string; readonly title: string }[];
  examine(server: Server, wanted: (id: string) => boolean, watch: Watch): Promise<Examination>;
}

function practice<P extends Patient>(
  name: string,
  checks: readonly Check<P>[],
  admit: (server: Server) => Promise<P>,
): Practice {
  return {
    name,
    checks,
    async examine(server, wanted, watch) {
      await using patient = await admit(server);
      const chosen = checks.filter(({ id }) => wanted(id));
      const { title, version } = patient;
      return { title, version, examined: await examine(patient, chosen, watch) };
    },
  };
}

export const practices: Readonly<Record<Kind, Practice>> = {
  postgres: practice("PostgreSQL", postgresChecks, postgresPatient),
  mysql: practice("MySQL", mysqlChecks, mysqlPatient),
  mariadb: practice("MariaDB", mariadbChecks, mysqlPatient),
  sqlite: practice("SQLite", sqliteChecks, sqlitePatient),
};
