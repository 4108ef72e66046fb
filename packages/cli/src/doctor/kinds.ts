/** One table of checks for each kind of server. */
import type { Kind, Server } from "../server.ts";
import type { Check } from "./check.ts";
import { type Watch, examine } from "./examine.ts";
import { mariadbChecks, mysqlChecks } from "./mysql/index.ts";
import { mysqlPatient } from "./mysql/patient.ts";
import type { Patient } from "./patient.ts";
import { postgresChecks } from "./postgres/index.ts";
import { postgresPatient } from "./postgres/patient.ts";
import { sqliteChecks } from "./sqlite/index.ts";
import { sqlitePatient } from "./sqlite/patient.ts";

export interface Practice {
  readonly name: string;
  readonly checks: readonly { readonly id: string; readonly title: string }[];
  examine(server: Server, wanted: (id: string) => boolean, watch: Watch): Promise<void>;
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
      const patient = await admit(server);
      watch.admitted(patient);
      await examine(
        patient,
        checks.filter(({ id }) => wanted(id)),
        watch,
      );
    },
  };
}

export const practices: Readonly<Record<Kind, Practice>> = {
  postgres: practice("PostgreSQL", postgresChecks, postgresPatient),
  mysql: practice("MySQL", mysqlChecks, mysqlPatient),
  mariadb: practice("MariaDB", mariadbChecks, mysqlPatient),
  sqlite: practice("SQLite", sqliteChecks, sqlitePatient),
};
