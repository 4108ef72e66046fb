-- holdfast 1: lock rows
CREATE TABLE IF NOT EXISTS holdfast_migration (
  id int NOT NULL PRIMARY KEY,
  name varchar(100) NOT NULL,
  applied_at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS holdfast_lock (
  id varbinary(64) NOT NULL PRIMARY KEY,
  name varchar(200) CHARACTER SET utf8mb4 NOT NULL,
  turn bigint NOT NULL DEFAULT 0
) ENGINE=InnoDB;
INSERT IGNORE INTO holdfast_migration (id, name) VALUES (1, 'lock rows');

-- holdfast 2: holders of lock rows
ALTER TABLE holdfast_lock ADD COLUMN holder bigint unsigned NOT NULL DEFAULT 0, ADD COLUMN since datetime(3) NULL;
INSERT IGNORE INTO holdfast_migration (id, name) VALUES (2, 'holders of lock rows');

-- holdfast 3: leases
CREATE TABLE IF NOT EXISTS holdfast_origin (
  one tinyint NOT NULL PRIMARY KEY,
  id char(36) CHARACTER SET ascii NOT NULL
) ENGINE=InnoDB;
INSERT IGNORE INTO holdfast_origin (one, id) VALUES (1, UUID());
CREATE TABLE IF NOT EXISTS holdfast_resource (
  id varbinary(500) NOT NULL PRIMARY KEY,
  name text CHARACTER SET utf8mb4 NOT NULL,
  given bigint NOT NULL DEFAULT 0
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS holdfast_seen (
  id varbinary(500) NOT NULL PRIMARY KEY,
  name text CHARACTER SET utf8mb4 NOT NULL,
  fence bigint NOT NULL
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS holdfast_lease (
  fence bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
  resource varbinary(500) NOT NULL,
  token varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name text CHARACTER SET utf8mb4 NOT NULL,
  holder varchar(200) CHARACTER SET utf8mb4 NOT NULL,
  mode varchar(20) CHARACTER SET ascii NOT NULL,
  weight int NOT NULL,
  waiting tinyint NOT NULL,
  since datetime(6) NOT NULL,
  until datetime(6) NOT NULL,
  KEY holdfast_lease_resource (resource)
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS holdfast_grip (
  fence bigint NOT NULL PRIMARY KEY,
  token varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL
) ENGINE=InnoDB;
DELIMITER //
CREATE PROCEDURE IF NOT EXISTS holdfast_take_lease(
  p_resource varbinary(500), p_name text CHARACTER SET utf8mb4, p_mode varchar(20), p_token varchar(64) CHARACTER SET ascii,
  p_holder varchar(200) CHARACTER SET utf8mb4, p_weight int, p_capacity int, p_ttl bigint, p_line bigint)
SQL SECURITY INVOKER
BEGIN
  DECLARE v_locked, v_waiting, v_unequal, v_line tinyint DEFAULT 0;
  DECLARE v_mine, v_left, v_taken, v_first, v_given, v_fence, v_gone, v_free bigint;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  looking: LOOP
    IF v_locked THEN
      -- An expired lease that a fenced transaction has locked is still held: it is skipped here, and counted below.
      SET v_gone = 0;
      reaping: LOOP
        SET v_fence = v_gone, v_gone = NULL;
        SELECT l.fence, l.waiting INTO v_gone, v_waiting FROM holdfast_lease l FORCE INDEX (holdfast_lease_resource)
          WHERE l.resource = p_resource AND l.fence > v_fence AND l.until <= UTC_TIMESTAMP(6) AND l.token <> p_token
          ORDER BY l.fence LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF v_gone IS NULL THEN
          LEAVE reaping;
        END IF;
        SET v_free = NULL;
        SELECT g.fence INTO v_free FROM holdfast_grip g WHERE g.fence = v_gone FOR UPDATE SKIP LOCKED;
        IF v_waiting = 1 OR v_free IS NOT NULL THEN
          DELETE FROM holdfast_lease WHERE fence = v_gone;
          DELETE FROM holdfast_grip WHERE fence = v_gone;
        END IF;
      END LOOP;
      SET v_fence = NULL;
    END IF;
    SET v_mine = NULL, v_waiting = NULL, v_left = NULL;
    SELECT l.fence, l.waiting, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.until) INTO v_mine, v_waiting, v_left
      FROM holdfast_lease l WHERE l.resource = p_resource AND l.token = p_token;
    IF v_locked AND v_waiting = 0 THEN
      -- Granted before, and the answer was lost.
      UPDATE holdfast_lease SET until = UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND WHERE fence = v_mine;
      SET v_fence = v_mine;
      LEAVE looking;
    END IF;
    SELECT COALESCE(SUM(l.weight), 0), MIN(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.until)), COALESCE(MAX(l.weight <> p_weight), 0)
      INTO v_taken, v_first, v_unequal FROM holdfast_lease l
      WHERE l.resource = p_resource AND l.token <> p_token AND (v_locked OR l.until > UTC_TIMESTAMP(6))
        AND (l.waiting = 0 OR v_mine IS NULL OR l.fence < v_mine);
    SET v_line = p_line > 0 AND (v_unequal OR v_mine IS NOT NULL) AND v_taken + p_weight > p_capacity;
    IF v_locked OR (v_taken + p_weight > p_capacity AND COALESCE(v_waiting, 1) = 1
      AND (NOT v_line OR COALESCE(v_left, 0) > p_line / 2)) THEN
      LEAVE looking;
    END IF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
    START TRANSACTION;
    -- An exclusive lock, whether the row was there or not.
    INSERT INTO holdfast_resource (id, name) VALUES (p_resource, p_name) ON DUPLICATE KEY UPDATE given = given;
    SELECT r.given INTO v_given FROM holdfast_resource r WHERE r.id = p_resource FOR UPDATE;
    SET v_locked = 1;
  END LOOP;
  IF v_fence IS NULL AND v_taken + p_weight > p_capacity THEN
    IF v_locked AND v_line AND v_mine IS NULL THEN
      INSERT INTO holdfast_lease (resource, token, name, holder, mode, weight, waiting, since, until)
        VALUES (p_resource, p_token, p_name, p_holder, p_mode, p_weight, 1, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL p_line MICROSECOND);
    ELSEIF v_locked AND v_line THEN
      UPDATE holdfast_lease SET until = UTC_TIMESTAMP(6) + INTERVAL p_line MICROSECOND WHERE fence = v_mine;
    END IF;
  ELSEIF v_fence IS NULL THEN
    -- A place in line has a number of its own, but a fence is given with the grant: they grow in the order of grants.
    DELETE FROM holdfast_lease WHERE fence = v_mine;
    INSERT INTO holdfast_lease (resource, token, name, holder, mode, weight, waiting, since, until)
      VALUES (p_resource, p_token, p_name, p_holder, p_mode, p_weight, 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND);
    SET v_fence = LAST_INSERT_ID();
    IF v_fence <= v_given THEN
      -- Somebody has set the counter back (TRUNCATE does): from here on it counts from where it was.
      DELETE FROM holdfast_lease WHERE fence = v_fence;
      SET v_fence = v_given + 1;
      INSERT INTO holdfast_lease (fence, resource, token, name, holder, mode, weight, waiting, since, until)
        VALUES (v_fence, p_resource, p_token, p_name, p_holder, p_mode, p_weight, 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND);
    END IF;
    INSERT INTO holdfast_grip (fence, token) VALUES (v_fence, p_token);
    UPDATE holdfast_resource SET given = v_fence WHERE id = p_resource;
  END IF;
  COMMIT;
  SELECT CAST(v_fence AS CHAR) AS fence, GREATEST(0, v_first) / 1000 AS free, v_line AS line,
    (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.since) / 1000 FROM holdfast_lease l WHERE l.fence = v_fence) AS since,
    (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.until) / 1000 FROM holdfast_lease l WHERE l.fence = v_fence) AS until,
    CONCAT((SELECT o.id FROM holdfast_origin o WHERE o.one = 1), '/', DATABASE()) AS origin;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE IF NOT EXISTS holdfast_release_lease(p_resource varbinary(500), p_token varchar(64) CHARACTER SET ascii, p_least bigint)
SQL SECURITY INVOKER
BEGIN
  DECLARE v_fence, v_free bigint;
  DECLARE v_waiting, v_early tinyint;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
  START TRANSACTION;
  SELECT l.fence INTO v_fence FROM holdfast_lease l WHERE l.resource = p_resource AND l.token = p_token;
  SELECT l.waiting, l.since + INTERVAL p_least MICROSECOND > UTC_TIMESTAMP(6) INTO v_waiting, v_early FROM holdfast_lease l
    WHERE l.fence = v_fence AND l.token = p_token FOR UPDATE;
  IF v_waiting = 0 THEN
    SELECT g.fence INTO v_free FROM holdfast_grip g WHERE g.fence = v_fence FOR UPDATE SKIP LOCKED;
  END IF;
  IF v_waiting = 1 OR (v_free IS NOT NULL AND NOT v_early) THEN
    DELETE FROM holdfast_lease WHERE fence = v_fence;
    DELETE FROM holdfast_grip WHERE fence = v_fence;
  ELSEIF v_waiting = 0 THEN
    UPDATE holdfast_lease SET token = '', until = IF(v_early, since + INTERVAL p_least MICROSECOND, LEAST(until, UTC_TIMESTAMP(6)))
      WHERE fence = v_fence;
    UPDATE holdfast_grip SET token = '' WHERE fence = v_free;
  END IF;
  COMMIT;
  SELECT v_waiting IS NOT NULL AS given;
END//
DELIMITER ;
INSERT IGNORE INTO holdfast_migration (id, name) VALUES (3, 'leases');

-- holdfast 4: once
CREATE TABLE IF NOT EXISTS holdfast_once (
  id varbinary(400) NOT NULL PRIMARY KEY,
  fingerprint varchar(64) CHARACTER SET ascii NOT NULL,
  result longtext CHARACTER SET utf8mb4 NOT NULL,
  at datetime(6) NOT NULL,
  until datetime(6) NOT NULL,
  KEY holdfast_once_until (until)
) ENGINE=InnoDB;
INSERT IGNORE INTO holdfast_migration (id, name) VALUES (4, 'once');

-- holdfast 5: transactions in fewer round trips
DELIMITER //
CREATE PROCEDURE IF NOT EXISTS holdfast_begin(p_id varbinary(64))
SQL SECURITY INVOKER
BEGIN
  DECLARE v_id varbinary(64);
  SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
  SET @holdfast_autocommit = @@autocommit, autocommit = 0;
  SAVEPOINT holdfast_begun;
  SELECT id INTO v_id FROM holdfast_lock WHERE id = p_id FOR UPDATE SKIP LOCKED;
  UPDATE holdfast_lock SET turn = turn + 1, holder = CONNECTION_ID(), since = UTC_TIMESTAMP(3) WHERE id = v_id AND IS_USED_LOCK(CONCAT(CONCAT('holdfast:', LEFT(SHA2(CONCAT(DATABASE(), ':', p_id), 256), 40)), ':held')) IS NULL;
  IF ROW_COUNT() <> 1 THEN
    SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 3572, MESSAGE_TEXT = 'holdfast: the lock is not there, or not free';
  END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE IF NOT EXISTS holdfast_commit()
SQL SECURITY INVOKER
BEGIN
  RELEASE SAVEPOINT holdfast_begun;
  IF @holdfast_autocommit THEN
    SET autocommit = 1;
  END IF;
  COMMIT;
END//
DELIMITER ;
INSERT IGNORE INTO holdfast_migration (id, name) VALUES (5, 'transactions in fewer round trips');
