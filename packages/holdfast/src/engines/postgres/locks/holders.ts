import type { Row } from "../../../seam/database.ts";
import type { Holder } from "../../../seam/errors.ts";

/** Columns of a session (`a`: pg_stat_activity, whose columns are null where this user may not see them). */
export const sessionColumns = `a.pid::pg_catalog.text AS pid, coalesce(a.application_name, '') AS application, coalesce(a.state, 'unknown') AS state,
  (extract(epoch FROM coalesce(a.xact_start, a.backend_start)) OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8 AS since`;

export function asHolder({ pid, application, state, since }: Row): Holder {
  return {
    pid: Number(pid),
    application: String(application),
    state: String(state),
    since: since === null || since === undefined ? undefined : new Date(Number(since)),
  };
}
