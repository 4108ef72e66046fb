/** A function of the server's own, replaced in one database: our statements name `pg_catalog`, so another schema is not enough. */
export function replacing(
  name: string,
  types: string,
  returns: string,
  setting: string,
  instead: string,
): string {
  const given =
    types === ""
      ? ""
      : types
          .split(",")
          .map((_, i) => `$${i + 1}`)
          .join(", ");
  const real = `pg_catalog.real_${name}(${given})`;
  const does = returns === "void" ? ["NULL", `PERFORM ${real}`] : [`RETURN ${instead}`, `RETURN ${real}`];
  return `SET LOCAL allow_system_table_mods = on;
    DO $do$ BEGIN
      IF to_regprocedure('pg_catalog.real_${name}(${types})') IS NULL THEN
        ALTER FUNCTION pg_catalog.${name}(${types}) RENAME TO real_${name};
        CREATE FUNCTION pg_catalog.${name}(${types}) RETURNS ${returns} LANGUAGE plpgsql AS $f$ BEGIN
          IF coalesce(current_setting('${setting}', true), '') <> '' THEN ${does[0]}; ELSE ${does[1]}; END IF;
        END $f$;
      END IF;
    END $do$`;
}
